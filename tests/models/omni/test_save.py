from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

import omnitrain as ot
from omnitrain.checkpoint.optimizer import save_optimizer
from omnitrain.checkpoint.safetensors_file import SafetensorsFile
from omnitrain.errors import UserError
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.save import save_whole
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state, init_state_of
from omnitrain.peers import SINGLE_PROCESS, GlooGroup
from omnitrain.recipe.layout import Layout, parse_layout
from tests.families import FAMILIES
from tests.parallel import factories
from tests.parallel.factories import any_to_any
from tests.parallel.fsdp.test_stored_weights import LAYOUTS
from tests.parallel.fsdp.test_weight_loader import deep
from tests.parallel.schedule.separate import Case, internvl
from tests.peaks import peak_bytes

A_BLOCK_EACH = 1


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def others_in(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir() if not file.name.startswith("model")}


def require_same(folder: Path, reference: Path) -> None:
    """Tensors of all files, bit for bit, and every other file."""
    got, wanted = tensors_in(folder), tensors_in(reference)
    assert got.keys() == wanted.keys()
    assert [name for name, tensor in got.items() if not torch.equal(tensor, wanted[name])] == []
    assert others_in(folder) == others_in(reference)


@pytest.mark.parametrize("family", ["qwen3_moe", "ernie4_5_vl_moe", "qwen2_5_vl", "janus", "llava"])
def test_a_file_per_block_has_what_transformers_puts_into_one(tmp_path: Path, family: str) -> None:
    config = FAMILIES[family]()
    model = build_omni_model(foundation=foundation_class(config)(config))
    model.save_pretrained(tmp_path / "one")
    save_whole(model, tmp_path / "many", SINGLE_PROCESS, A_BLOCK_EACH)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    require_same(tmp_path / "many", tmp_path / "one")
    loaded = OmniModel.from_pretrained(tmp_path / "many")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def spread_model() -> OmniModel:
    state = init_parallel_state()
    return build_parallelize_model(any_to_any(), parallel_state=state, enable_mixed_precision=False)


def saved_by_ranks(folder: Path) -> int:
    """Bytes of weights that this rank had whole, all files together."""
    had = 0

    def counted(file: SafetensorsFile, name: str, tensor: torch.Tensor) -> None:
        nonlocal had
        had += tensor.nbytes
        write(file, name, tensor)

    write = SafetensorsFile.write
    with patch.object(SafetensorsFile, "write", counted):
        save_whole(spread_model(), folder, GlooGroup(), A_BLOCK_EACH)
    return had


def test_ranks_deal_out_the_files_and_write_what_one_process_writes(ranks: RankPool, tmp_path: Path) -> None:
    model = any_to_any()
    model.save_pretrained(tmp_path / "one")
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "model-00001-of-00002.safetensors").write_text("of another model")
    (tmp_path / "many" / "model_ema.safetensors.txt").write_text("of the user")
    shares = ranks.run(saved_by_ranks, tmp_path / "many", timeout_s=60, world=3)
    require_same(tmp_path / "many", tmp_path / "one")
    assert (tmp_path / "many" / "model_ema.safetensors.txt").is_file()
    assert sum(shares) == sum(value.nbytes for value in set(model.state_dict(keep_vars=True).values()))
    assert min(shares) > 0.1 * sum(shares)


def saved_as(folder: Path, plan: ot.ParallelPlan) -> None:
    """Load ``folder/one`` under a layout, and save it."""
    bare = build_omni_model(config_path=folder / "one", init_device="meta")
    model = build_parallelize_model(bare, folder / "one", init_state_of(plan), plan, enable_mixed_precision=False)
    save_whole(model, folder / "many", GlooGroup(), A_BLOCK_EACH)


TOWER_ON_TWO_OF_FOUR = Case("internvl", "group", "", "", "tp4", "all", "", "").layout


INTERNVL = pytest.param(
    partial(internvl, 4), TOWER_ON_TWO_OF_FOUR, id="internvl tower on two of four", marks=pytest.mark.slow
)


def of_layouts() -> Iterator[Any]:
    for case in LAYOUTS:
        name, word = getattr(case, "values", case)
        if "offload" not in word:
            values = getattr(factories, name), parse_layout(word)
            yield pytest.param(*values, id=f"{name} {word}", marks=getattr(case, "marks", ()))


@pytest.mark.parametrize(("make", "layout"), [*of_layouts(), INTERNVL])
def test_every_layout_writes_the_files_that_it_was_loaded_from(
    ranks: RankPool, tmp_path: Path, make: Callable[[], Any], layout: Layout
) -> None:
    model = make()
    (model if isinstance(model, OmniModel) else build_omni_model(foundation=model)).save_pretrained(tmp_path / "one")
    ranks.run(saved_as, tmp_path, layout.plan(), timeout_s=60, world=layout.num_ranks)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    require_same(tmp_path / "many", tmp_path / "one")


def peak_of_saving(folder: Path) -> tuple[int, int]:
    """Bytes of the weights of a model of 16 equal layers, and the most that saving it and AdamW's state made of it."""
    state = init_parallel_state()
    model = build_parallelize_model(deep("cpu"), parallel_state=state, enable_mixed_precision=False)
    optimizer, peers = torch.optim.AdamW(model.parameters(), fused=True), GlooGroup()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    def save() -> None:
        save_whole(model, folder, peers, A_BLOCK_EACH)
        save_optimizer(model, optimizer, folder / "optimizer")

    return sum(parameter.numel() * 4 for parameter in model.parameters()), peak_bytes(save)


@pytest.mark.second
def test_no_rank_has_more_than_its_file_in_memory(ranks: RankPool, tmp_path: Path) -> None:
    """A layer of 16, what is gathered of the next, and what gloo's thread has not let go of yet."""
    for whole, peak in ranks.run(peak_of_saving, tmp_path, timeout_s=60, world=4):
        assert peak < 4 * whole / 16


def saved_plainly(folder: Path) -> None:
    model = spread_model()
    with pytest.raises(UserError, match=r"spread over ranks: found a positional argument \(True\), max_shard_size;"):
        model.save_pretrained(folder, True, max_shard_size="1GB")
    with pytest.raises(UserError, match="spread over ranks: found push_to_hub;"):
        model.save_pretrained(folder, push_to_hub=True)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()  # as a forward leaves it that no backward follows
    model.save_pretrained(folder, is_main_process=dist.get_rank() == 0)


def test_a_spread_model_is_saved_as_any_other_and_takes_no_arguments(ranks: RankPool, tmp_path: Path) -> None:
    any_to_any().save_pretrained(tmp_path / "one")
    ranks.run(saved_plainly, tmp_path / "two", timeout_s=60, world=2)
    require_same(tmp_path / "two", tmp_path / "one")
    assert [file.name for file in (tmp_path / "two").glob("model*")] == ["model.safetensors"]


def refused(folder: Path) -> str:
    """What this rank is told, where rank 1 cannot write."""
    model, peers = spread_model(), GlooGroup()

    def write(*_: object) -> None:
        if peers.rank == 1:
            raise OSError(28, "No space left on device")

    with patch.object(SafetensorsFile, "write", write), pytest.raises(Exception) as caught:
        save_whole(model, folder, peers, A_BLOCK_EACH)
    return str(caught.value)


def test_where_one_rank_cannot_write_all_are_told(ranks: RankPool, tmp_path: Path) -> None:
    told = "[Errno 28] No space left on device"
    assert ranks.run(refused, tmp_path, timeout_s=60, world=2) == [f"rank 1 failed: OSError: {told}", told]
