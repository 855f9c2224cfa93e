"""Pipelines whose blocks are compiled, or whose parameters are in host memory, have the gradients of one process."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from omnitrain.errors import UserError
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.pipeline.apply import whole_over_stages
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe import ComponentPlan, ParallelPlan
from tests.parallel.schedule.pipelines import build
from tests.parallel.schedule.test_draws import packs

CHUNKS, ZBV = {"schedule": {"chunks": 2}}, {"schedule": {"kind": "zbv"}}


def on_stages(plan: dict) -> OmniModel:
    torch.manual_seed(0)
    return build_parallelize_model(
        build_omni_model(foundation=build("qwen3")).train(),
        parallel_state=init_parallel_state(pp_size=2),
        parallel_plan=ParallelPlan(components={"foundation": ComponentPlan(**plan)}),
        enable_mixed_precision=False,
    )


def gradients_on_stages(plans: tuple[dict, ...]) -> list[tuple[int, Mapping[str, Tensor]]]:
    """For each plan: number of recompiles, and the gradients of two steps together."""
    found = []
    for plan in plans:
        model = on_stages(plan)
        for _ in range(2):
            accumulate_gradients(model, step_planner(model)(packs()))
        layout = layout_of(model)
        compiled = layout.components["foundation"].compiled
        assert (compiled is None) != bool(plan.get("compile"))
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        recompiles = 0 if compiled is None else compiled.recompiles
        found.append((recompiles, whole_over_stages(gradients, layout.pipeline)))
    return found


@pytest.mark.parametrize(
    "plans",
    [
        tuple(plan | {"memory": {"offload": ["parameters"]}} for plan in (CHUNKS, ZBV)),
        pytest.param((CHUNKS | {"compile": True},), marks=pytest.mark.slow),
    ],
    ids=["offload", "compile"],
)
def test_gradients_of_stages_are_those_of_one_process(ranks: RankPool, plans: tuple[dict, ...]) -> None:
    torch.manual_seed(0)
    model = build_omni_model(foundation=build("qwen3")).train()
    for _ in range(2):
        accumulate_gradients(model, step_planner(model)(packs()))
    for rank in ranks.run(gradients_on_stages, plans, timeout_s=300, world=2):
        for recompiles, found in rank:
            assert recompiles == 0
            for name, parameter in model.named_parameters():
                error = (found[name] - parameter.grad).abs().max()
                assert error <= 1e-5 * parameter.grad.abs().max(), name


def refusal(plan: dict) -> str:
    with pytest.raises(UserError) as refused:
        on_stages(plan)
    return str(refused.value)


def test_compiled_blocks_on_zbv_are_refused_before_the_run(ranks: RankPool) -> None:
    for message in ranks.run(refusal, ZBV | {"compile": True}, timeout_s=60, world=2):
        assert "compile: found true with `schedule: {kind: zbv}`" in message and "remove one of the two" in message
