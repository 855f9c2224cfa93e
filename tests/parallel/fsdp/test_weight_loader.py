"""Weights that rank 0 alone has reach every rank, and none has all of them in its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import swap_tensors
from transformers import PreTrainedModel

import omnitrain as ot
from omnitrain.errors import UserError, WeightsError
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.ops.experts.entry import settings_of
from omnitrain.ops.experts.weights import experts_in
from omnitrain.parallel.fsdp.load import first_ranks
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from tests.families import FAMILIES
from tests.parallel import factories
from tests.parallel.laid_out import full
from tests.peaks import peak_bytes

PRECISION = ot.recipe.Precision(param="bfloat16")
LAYOUTS = [
    (
        "any_to_any",
        ot.ComponentPlan(dp_replicate=2, mode="hsdp", memory={"offload": ["parameters"]}, precision=PRECISION),
        4,
    ),
    pytest.param(
        "moe_with_shared_experts", ot.ComponentPlan(tp=2, ep=2, experts={"chunks": 2}), 4, marks=pytest.mark.slow
    ),
    ("qwen3_moe_with_adapters", ot.ComponentPlan(ep=2), 2),
]


def bare(model: PreTrainedModel) -> PreTrainedModel:
    """The same on the meta device, its weights of another type: that of those in a file is not known before."""
    for parameter in model.parameters():
        there = torch.empty_like(parameter, device="meta", dtype=torch.float64)
        swap_tensors(parameter, nn.Parameter(there, parameter.requires_grad))
    for module in model.modules():
        module._buffers.update({name: value.to("meta") for name, value in module._buffers.items() if value is not None})
    return model


def given(name: str) -> PreTrainedModel:
    model = getattr(factories, name)()
    return model if dist.get_rank() == 0 else bare(model)


def lay_out(model: PreTrainedModel, plan: ot.ParallelPlan) -> ot.OmniModel:
    state = init_state_of(plan)
    return ot.build_parallelize_model(model, parallel_state=state, parallel_plan=plan, enable_mixed_precision=None)


def overlapped(model: ot.OmniModel) -> list[bool]:
    """Of each layer's experts, whether others are computed while their rows travel."""
    return [settings_of(module).overlap_with is not None for _, module in experts_in(model)]


def found_on_rank(name: str, default: ot.ComponentPlan) -> dict[str, Any]:
    plan = ot.ParallelPlan(default=default)
    plain, laid = lay_out(getattr(factories, name)(), plan), lay_out(given(name), plan)
    expected, found = ({**dict(model.named_parameters()), **dict(model.named_buffers())} for model in (plain, laid))
    return {
        "names": list(expected) == list(found),
        "values": [n for n in expected if not torch.equal(full(found[n].detach()), full(expected[n].detach()))],
        "kinds": [n for n in expected if (found[n].dtype, found[n].device) != (expected[n].dtype, expected[n].device)],
        "overlapped": overlapped(laid) == overlapped(plain),
        "trained": [n for n in expected if found[n].requires_grad != expected[n].requires_grad],
        "number": len(expected),
    }


@pytest.mark.parametrize(("name", "default", "world"), LAYOUTS)
def test_a_model_that_rank_0_alone_has_is_the_same_on_all_ranks(
    ranks: RankPool, name: str, default: ot.ComponentPlan, world: int
) -> None:
    for found in ranks.run(found_on_rank, name, default, timeout_s=120, world=world):
        assert found.pop("number") > 20
        assert found == {"names": True, "values": [], "kinds": [], "overlapped": True, "trained": []}


def deep(device: str) -> PreTrainedModel:
    config = FAMILIES["qwen3"]()
    config.num_hidden_layers, config.layer_types = 16, 16 * ["full_attention"]
    config.hidden_size, config.intermediate_size = 128, 384
    with torch.device(device):
        return foundation_class(config)(config)


def peak_on_rank(folder: Path | None, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Bytes of the whole model in fp32, and the most that laying it out so needed beside what was there."""
    device = "cpu" if folder is None and dist.get_rank() == 0 else "meta"
    model, plan = build_omni_model(foundation=deep(device).to(dtype), init_device=device), ot.ParallelPlan()
    state, path = init_state_of(plan), None if folder is None else str(folder)
    _ = model.runner  # its contract is checked on a tiny model
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    return whole, peak_bytes(lambda: ot.build_parallelize_model(model, path, state, plan, enable_mixed_precision=None))


def test_no_rank_ever_has_a_model_that_the_first_one_hands_out(ranks: RankPool) -> None:
    """A quarter of it, and the unit that is being sharded, of 16; the first rank has what it hands out, and no more.

    Matrices just sent may be there, too: gloo's thread lets go of them when it comes to it.
    """
    for whole, peak in ranks.run(peak_on_rank, None, timeout_s=120, world=4):
        assert whole / 4 < peak < whole / 4 + whole / 8


def test_no_rank_ever_has_a_model_that_all_read(ranks: RankPool, tmp_path: Path) -> None:
    """A quarter of it. The profiler counts the file, too, which is mapped, and not in memory of the process."""
    build_omni_model(foundation=deep("cpu")).save_pretrained(tmp_path)
    mapped = (tmp_path / "model.safetensors").stat().st_size
    for whole, peak in ranks.run(peak_on_rank, tmp_path, timeout_s=120, world=4):
        assert whole / 4 < peak - mapped < whole / 4 + whole / 32


def test_weights_of_a_lower_precision_are_never_whole_in_fp32(ranks: RankPool) -> None:
    for whole, peak in ranks.run(peak_on_rank, None, torch.bfloat16, timeout_s=120, world=4):
        assert whole / 8 < peak < whole / 4 + whole / 8  # the first gives up what it had meanwhile


def refused_on_rank() -> str:
    model = factories.qwen3() if dist.get_rank() == 0 else bare(factories.qwen3_of_four_heads())
    with pytest.raises(UserError) as caught:
        lay_out(model, ot.ParallelPlan())
    return str(caught.value)


def test_another_model_than_that_of_rank_0_is_refused_on_all_ranks(ranks: RankPool) -> None:
    messages = ranks.run(refused_on_rank, timeout_s=60, world=2)
    assert messages[0] == messages[1]
    assert "4 parameters differ from rank 0, such as foundation.model.layers.0.self_attn.k_proj.weight" in messages[0]


def told_of(error: Exception) -> str:
    def fail() -> None:
        raise error

    with pytest.raises(Exception) as told:
        first_ranks(fail)
    return repr(told.value)


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (WeightsError("no head"), "WeightsError('no head')"),
        (MemoryError("a lot"), "TrainingError('rank 0 failed: MemoryError: a lot')"),
    ],
)
def test_where_rank_0_cannot_read_the_weights_no_rank_waits_for_them(
    ranks: RankPool, error: Exception, others: str
) -> None:
    assert ranks.run(told_of, error, timeout_s=30, world=2) == [repr(error), others]
