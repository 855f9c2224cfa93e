"""A text model on pp x ep x fsdp has the bits of the same ranks without pp, with the same packs on them.

Without pp, the schedule is the one that pairs passes: it adds up the gradients of all micro-batches and reduces them
once, as a pipeline does. FSDP's own hooks reduce those of each micro-batch, which is another order of sums.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import get_parallel_state, init_state_of
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe.layout import parse_layout
from tests.families import FAMILIES
from tests.models.staged import with_layers
from tests.parallel.schedule.paired import pack

MICRO_BATCHES = 4
WITHOUT_STAGES = "dp2.ep2.paired.accum4"


def step_on_rank(family: str, layout: str) -> tuple[int, Tensor, dict[str, Tensor]]:
    """Return this rank's number in data parallelism, its part of the loss, and its shards of gradients, in fp32."""
    config = with_layers(FAMILIES[family](), 4)
    torch.manual_seed(0)
    foundation = foundation_class(config)(config)
    init_peaked_(foundation)
    model = build_omni_model(foundation=foundation).train()
    samples = [probe.sample for probe in probe_samples(foundation, model.runner.native)]
    plan = parse_layout(layout).plan()
    init_state_of(plan)
    build_parallelize_model(model, parallel_plan=plan, enable_mixed_precision=False)
    rank = get_parallel_state().dp_rank
    batch = step_planner(model)([pack(samples, index, rank) for index in range(MICRO_BATCHES)])
    loss = accumulate_gradients(model, batch)
    shards = {
        name: parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return rank, loss, shards


def require_same_bits(ranks: RankPool, family: str, layouts: tuple[str, ...]) -> None:
    results = ranks.run(step_on_rank, family, WITHOUT_STAGES, timeout_s=60, world=2)
    expected = {rank: (loss, shards) for rank, loss, shards in results}
    for layout in layouts:
        losses = dict.fromkeys(expected, torch.zeros(()))
        found: dict[int, dict[str, Tensor]] = {rank: {} for rank in expected}
        for rank, loss, shards in ranks.run(step_on_rank, family, layout, timeout_s=60, world=4):
            losses[rank] = losses[rank] + loss  # zero, but on the rank of the last stage
            assert not found[rank].keys() & shards.keys()
            found[rank] |= shards
        for rank, (loss, shards) in expected.items():
            assert loss > 0 and torch.equal(losses[rank], loss), layout
            assert found[rank].keys() == shards.keys()
            assert [name for name, shard in shards.items() if not torch.equal(found[rank][name], shard)] == [], layout
            assert all(shard.any() for shard in shards.values() if shard.numel())


@pytest.mark.second
def test_experts_on_stages_have_the_bits_of_the_same_ranks_without_stages(ranks: RankPool) -> None:
    require_same_bits(ranks, "qwen3_moe", ("pp2.dp2.ep2", "pp2.v2.dp2.ep2.recompute"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next"])
def test_other_models_and_schedules_have_the_bits_of_the_same_ranks_without_stages(
    ranks: RankPool, family: str
) -> None:
    require_same_bits(ranks, family, ("pp2.gpipe.dp2.ep2", "pp2.v2.dp2.ep2", "pp2.zbv.dp2.ep2.recompute"))
