"""Layouts in bf16 are compared with one process in bf16, as far as rounding tells them apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from omnitrain.errors import UserError
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.resolve.plans import resolve_without_ranks
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.reference import dtypes_of
from omnitrain.parallel.verify.verify import VerifyRow, verify
from omnitrain.recipe.layout import parse_layout
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
from omnitrain.recipe.plan_groups import Precision
from tests.models.every_family import peaked_model
from tests.parallel import factories
from tests.parallel.verify.test_verify import hf_samples


class Times(torch.autograd.Function):
    """Multiplies gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, times: float) -> Tensor:
        ctx.times = times
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.times, None


def wrong_on_rank_1(times: float) -> OmniModel:
    """Its gradients on the second rank are multiplied; by 0: they do not arrive in the sum."""
    model = build_omni_model(foundation=factories.qwen3())

    def multiplied(module: Any, args: Any, output: Any) -> Any:
        return replace(output, losses={n: replace(t, sum=Times.apply(t.sum, times)) for n, t in output.losses.items()})

    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        model.register_forward_hook(multiplied)
    return model


def rows(ranks: RankPool, times: float, *layouts: str) -> tuple[VerifyRow, ...]:
    return verify(partial(wrong_on_rank_1, times), hf_samples("qwen3"), layouts, pool=ranks, timeout_s=120).rows


@pytest.mark.second
def test_layouts_train_as_one_process_in_their_precision(ranks: RankPool) -> None:
    for row in rows(ranks, 1.0, "tp2.bf16", "dp2.bf16_param"):
        assert row.status == "equal" and 0 < row.grad_error < row.rounding, row
        assert 1e-3 < row.visible < 0.02


@pytest.mark.parametrize(("times", "at_least"), [(1.05, 1.02), pytest.param(0.0, 0.4, marks=pytest.mark.slow)])
def test_a_gradient_that_one_rank_gets_wrong_is_found_in_bf16(ranks: RankPool, times: float, at_least: float) -> None:
    (row,) = rows(ranks, times, "dp2.bf16")
    assert row.status == "different" and row.loss_error < 1e-3, row
    assert "the gradient of" in row.reason
    assert abs(at_least - 1) / 2 < row.grad_error < 1, row.grad_error


def test_only_a_plan_with_a_low_dtype_has_dtypes() -> None:
    assert dtypes_of(parse_layout("dp2.recompute").plan()) == ""
    assert (
        dtypes_of(ParallelPlan(default=ComponentPlan(precision=Precision(compute="float32", reduce="bfloat16")))) == ""
    )
    of_part = ParallelPlan(components={"foundation": ComponentPlan(dp_shard=2, precision=Precision(param="bfloat16"))})
    kept = ParallelPlan.model_validate_json(dtypes_of(of_part))
    assert kept.of("foundation") == ComponentPlan(precision=Precision(param="bfloat16"))
    assert kept.of("image_encoder") == ComponentPlan()


def test_weights_that_must_stay_fp32_beside_others_are_refused_if_these_are_bf16() -> None:
    """Their shards would be in one FSDP unit, which has one dtype. With fp32 weights they are master weights as all."""
    model = build_omni_model(foundation=peaked_model("flint"))
    assert resolve_without_ranks(model, parse_layout("bf16").plan(), None)
    with pytest.raises(UserError, match=r"self_attn.sinks must stay float32, but .*; use param: float32"):
        resolve_without_ranks(model, parse_layout("bf16_param").plan(), None)
