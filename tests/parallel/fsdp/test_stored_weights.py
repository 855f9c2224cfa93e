"""Each rank reads its own shards of a checkpoint, and no more, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import omnitrain as ot
from omnitrain.models.hf.stored_values import FILES
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.fsdp import weight_loader
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.recipe.layout import parse_layout
from tests.parallel import factories

LAYOUTS = [
    pytest.param("qwen3_moe", "dp4", marks=pytest.mark.slow),
    pytest.param("gemma3", "hsdp2x2", marks=pytest.mark.slow),
    ("gemma3", "dp3"),  # no dim is a multiple of 3
    pytest.param("qwen3", "tp2.dp2", marks=pytest.mark.second),
    ("qwen3_moe", "dp4.ep4"),
    pytest.param("qwen3_vl_moe", "dp4.ep2", marks=pytest.mark.slow),
    ("qwen3_moe", "pp2.dp2.accum2"),
    pytest.param("any_to_any", "vision1+dp3", marks=pytest.mark.second),
    ("any_to_any", "dp2.offload"),
]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own(model: ot.OmniModel) -> dict[str, Tensor]:
    """What this rank keeps of each parameter."""
    return {name: local(p.detach()) for name, p in model.named_parameters() if not p.is_meta}


def lay_out(model: PreTrainedModel, layout: str, path: str | None = None) -> ot.OmniModel:
    plan = parse_layout(layout).plan()
    return ot.build_parallelize_model(model, path, init_state_of(plan), plan, enable_mixed_precision=False)


def loaded_on_rank(folder: Path, name: str, layout: str) -> dict[str, Any]:
    """Bytes that the rank reads and keeps, and where its weights are not those of a model that each rank has built."""
    expected = own(lay_out(getattr(factories, name)(), layout))
    before = FILES.num_bytes
    found = own(lay_out(build_omni_model(config_path=folder, init_device="meta"), layout, str(folder)))
    return {
        "read": FILES.num_bytes - before,
        "kept": sum(tensor.nbytes for tensor in found.values()),
        "names": list(found) == list(expected),
        "values": [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])],
    }


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_a_rank_reads_what_it_keeps(ranks: RankPool, tmp_path: Path, name: str, layout: str) -> None:
    model = getattr(factories, name)()
    (model if isinstance(model, ot.OmniModel) else build_omni_model(foundation=model)).save_pretrained(tmp_path)
    world = 2 if layout.startswith("dp2") else 3 if layout == "dp3" else 4
    for found in ranks.run(loaded_on_rank, tmp_path, name, layout, timeout_s=120, world=world):
        read, kept = found.pop("read"), found.pop("kept")
        assert read == kept > 0
        assert found == {"names": True, "values": []}


def loaded_without_files(folder: Path, name: str) -> dict[str, Any]:
    """As :func:`loaded_on_rank`, where only the first rank has the files."""
    with patch.object(weight_loader, "_digest", lambda file: str(file) if dist.get_rank() == 0 else None):
        return loaded_on_rank(folder, name, "dp2")


def test_a_rank_without_the_files_gets_its_shards_from_the_first(ranks: RankPool, tmp_path: Path) -> None:
    build_omni_model(foundation=factories.qwen3_moe()).save_pretrained(tmp_path)
    first, other = ranks.run(loaded_without_files, tmp_path, "qwen3_moe", timeout_s=60, world=2)
    assert (first["read"], other["read"]) == (first["kept"] + other["kept"], 0)
    assert (first["values"], other["values"]) == ([], [])
