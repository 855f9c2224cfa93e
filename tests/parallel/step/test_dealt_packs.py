"""`place: world` of the foundation: packs are dealt to ranks by cost, and the step stays the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.parallel import parallelize
from omnitrain.parallel.resolve import dtype_of
from omnitrain.parallel.schedule import executor
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import step_planner
from tests.parallel.laid_out import PLAIN, full
from tests.tiny import tiny_model, tiny_processor, tiny_samples

RATE, QUADRATIC = 0.1, 0.01


@dataclass
class Trained:
    """A step of a rank: its loss of all ranks, the weights after it, its packs' samples, and their costs."""

    loss: float
    weights: dict[str, torch.Tensor]
    indices: list[tuple[int, ...]]
    cost: float


def packs_of_ranks(ranks: int) -> list[list[Pack]]:
    """Two micro-batches of each rank; the first rank has all the long samples, and all images."""
    short = tiny_samples(tiny_processor(tiny_model()), 6 * ranks, ["text"])
    media = tiny_samples(tiny_processor(tiny_model()), 3, ["images_to_text", "video_to_text", "speech_to_text"])
    long = [replace(repeated(sample, 6), index=100 + number) for number, sample in enumerate(short[:4])]
    packs = [[short[6 * rank : 6 * rank + 2], short[6 * rank + 2 : 6 * rank + 4]] for rank in range(ranks)]
    of_media = [replace(sample, index=200 + number) for number, sample in enumerate(media)]
    packs[0] = [[*long[:2], of_media[0]], [*long[2:], *of_media[1:]]]
    return [[Pack.from_samples(samples) for samples in of_rank] for of_rank in packs]


def repeated(sample: Sample, times: int) -> Sample:
    """A longer text."""
    ids, mask = np.tile(sample.input_ids, times), np.tile(sample.loss_mask, times)
    return replace(sample, input_ids=ids, loss_mask=mask, position_ids=np.arange(len(ids)))


def trained(plan: dict[str, Any], state: dict[str, int], drawn: list[list[Pack]]) -> Trained:
    """One step in float64; the loss of each token is in float32."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (parallelize, executor):
            patch.setattr(module, "dtype_of", lambda name: torch.float64 if name == "float32" else dtype_of(name))
        own = ot.init_parallel_state(**state)
        parallel_plan = ot.ParallelPlan(components={"foundation": ot.ComponentPlan(**plan)})
        model = ot.build_parallelize_model(
            tiny_model(decoders={}).double().train(), parallel_plan=parallel_plan, **PLAIN
        )
        batch = step_planner(model)(drawn[own.dp_rank])
        loss = ot.accumulate_gradients(model, batch).double()
        dist.all_reduce(loss)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
    lengths = [length for pack in batch.packs for length in pack.info.lengths]
    return Trained(
        float(loss),
        {name: full(weight).detach().clone() for name, weight in model.named_parameters() if not weight.is_meta},
        [pack.info.indices for pack in batch.packs],
        sum(length + QUADRATIC * length**2 for length in lengths),
    )


STATES = [({}, 2), ({"tp_size": 2}, 4), ({"pp_size": 2}, 4), ({"cp_size": 2}, 4)]


@pytest.mark.parametrize(
    ("state", "world"), [STATES[0], *(pytest.param(*state, marks=pytest.mark.slow) for state in STATES[1:])]
)
def test_where_a_pack_runs_never_changes_the_step(ranks: RankPool, state: dict[str, int], world: int) -> None:
    drawn = packs_of_ranks(2)
    plain, dealt = (
        ranks.run(trained, plan, state, drawn, timeout_s=120, world=world)
        for plan in ({}, {"place": "world", "quadratic_cost": QUADRATIC})
    )
    assert dealt[0].loss == pytest.approx(plain[0].loss, rel=1e-6)
    for of_plain, of_dealt in zip(plain, dealt, strict=True):
        for name, weight in of_plain.weights.items():
            assert (of_dealt.weights[name] - weight).abs().max() <= 1e-6 * weight.abs().max(), name
    every = {tuple(sorted(indices)) for of_rank in plain for indices in of_rank.indices}
    assert {tuple(sorted(indices)) for of_rank in dealt for indices in of_rank.indices} == every
    costs = [sorted({round(one.cost) for one in run}) for run in (plain, dealt)]
    assert [one.indices for one in plain] != [one.indices for one in dealt]
    assert max(costs[1]) < 0.7 * max(costs[0])


def test_a_run_of_one_micro_batch_per_rank_stays_as_it_is(ranks: RankPool) -> None:
    drawn = [of_rank[:1] for of_rank in packs_of_ranks(2)]
    found = ranks.run(trained, {"place": "world"}, {}, drawn, timeout_s=120, world=2)
    assert [one.indices for one in found] == [[pack.info.indices for pack in of_rank] for of_rank in drawn]
