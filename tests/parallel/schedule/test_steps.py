"""Steps of a pipeline with any number of micro-batches and any mixture of modalities; what a rank keeps of them."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch

from omnitrain.data.packing.sample import Sample
from omnitrain.models.omni.model import OmniModel
from omnitrain.optim.gradients import gradient_norm
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.pipeline.apply import whole_over_stages
from omnitrain.parallel.schedule import executor
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.schedule.table import schedule_of
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe import ComponentPlan, ParallelPlan
from tests.parallel.step.random_tables import step_batch
from tests.tiny import FOUNDATION, TASKS, tiny_model, tiny_processor, tiny_samples

MOST = 9
Drawn = list[list[list[list[Sample]]]]  # [step][data-parallel rank][micro-batch]


def four_blocks() -> OmniModel:
    """The any-to-any model, with as many blocks as two ranks have stages."""
    return tiny_model(foundation=FOUNDATION | {"num_hidden_layers": 4}).train()


def random_steps(number: int) -> Drawn:
    """So many steps: one to nine micro-batches, then one to three; any modalities, nothing at all, text alone."""
    rng = np.random.default_rng(0)
    every = tiny_samples(tiny_processor(four_blocks()), 3 * len(TASKS))
    text = [sample for sample in every if not sample.spans]

    def drawn(step: int) -> list[Sample]:
        pool = [every, every, text, []][int(rng.integers(4))] if step % 5 else text
        return [pool[i] for i in rng.integers(0, len(pool), int(rng.integers(1, 3)))] if pool else []

    numbers = [1 + step % MOST if step < MOST else 1 + step % 3 for step in range(number)]
    return [[[drawn(step) for _ in range(size)] for _ in range(2)] for step, size in enumerate(numbers)]


def on_stages(chunks: int, data_parallel: int = 1) -> OmniModel:
    state = init_parallel_state(pp_size=2, dp_shard_size=data_parallel)
    plan = ParallelPlan(components={"foundation": ComponentPlan(schedule={"chunks": chunks})})
    return build_parallelize_model(
        four_blocks(), parallel_state=state, parallel_plan=plan if chunks > 1 else None, enable_mixed_precision=False
    )


def gradients_on_stages(steps: Drawn) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Of every third step: the norm of all gradients, and the gradients."""
    model = on_stages(chunks=2, data_parallel=2)
    pipeline, planner = layout_of(model).pipeline, step_planner(model)
    rank, found = layout_of(model).state.dp_rank, []
    for index, step in enumerate(steps):
        accumulate_gradients(model, step_batch(model, planner, step[rank]))
        if index % 3 == 2:
            norm = gradient_norm(model.parameters()).item()
            whole = whole_over_stages({name: p.grad for name, p in model.named_parameters()}, pipeline)
            found.append((norm, {name: grad for name, grad in whole.items() if grad is not None}))
        model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("number", [6, pytest.param(30, marks=pytest.mark.slow)])
def test_random_steps_on_stages_have_the_gradients_of_one_process(ranks: RankPool, number: int) -> None:
    steps = random_steps(number)
    model, expected = four_blocks(), []
    planner = step_planner(model)
    for index, step in enumerate(steps):
        if index % 3 == 2:
            together = [sample for rank in step for micro_batch in rank for sample in micro_batch]
            accumulate_gradients(model, step_batch(model, planner, [together]))
            norm = gradient_norm(model.parameters()).item()
            expected.append((norm, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
            model.zero_grad(set_to_none=True)
    for found in ranks.run(gradients_on_stages, steps, timeout_s=120, world=4):
        for (norm, gradients), (expected_norm, expected_gradients) in zip(found, expected, strict=True):
            assert norm == pytest.approx(expected_norm, rel=1e-5)
            largest = max((float(g.abs().max()) for g in expected_gradients.values()), default=0.0)
            for name in gradients.keys() | expected_gradients.keys():
                got, want = gradients.get(name), expected_gradients.get(name)
                if got is None or want is None:  # zeros on one side
                    assert float((want if got is None else got).abs().max()) == 0.0
                else:
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * max(largest, 1e-3))


def peaks_and_parameters(number: int) -> tuple[int, int, set[str], set[str]]:
    """The most micro-batches in flight on this rank, and in its schedule; parameters in memory, and with a gradient."""
    model = on_stages(chunks=2)
    live = peak = 0

    class Counted(executor._LiveMicroBatch):
        def __init__(self, *arguments: object) -> None:
            nonlocal live, peak
            super().__init__(*arguments)
            live += 1
            peak = max(peak, live)

        def __del__(self) -> None:
            nonlocal live
            live -= 1

    samples = tiny_samples(tiny_processor(model), len(TASKS))
    batch = step_batch(model, step_planner(model), [[sample] for sample in samples[:number]])
    with patch.object(executor, "_LiveMicroBatch", Counted):
        accumulate_gradients(model, batch)
    pipeline = layout_of(model).pipeline
    assert live == 0
    here = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert here.isdisjoint(pipeline.absent)
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    return peak, schedule_of(model, batch.plan).peak_live()[pipeline.stages.rank], here, with_gradient


def test_a_rank_keeps_the_activations_of_its_schedule_and_the_parameters_of_its_stages(ranks: RankPool) -> None:
    first, last = ranks.run(peaks_and_parameters, 4, timeout_s=60, world=2)
    for peak, planned, here, with_gradient in (first, last):
        assert peak == planned and with_gradient <= here
    everything = {name for name, _ in four_blocks().named_parameters()}
    decoders = {name for name in everything if name.startswith(("image_decoder", "audio_decoder"))}
    assert first[2] | last[2] == everything
    assert first[2] & last[2] == decoders | ({"foundation.model.embed_tokens.weight"} & first[2] & last[2])
    blocks = {
        rank: {int(n.split("layers.")[1].split(".")[0]) for n in of if "foundation.model.layers" in n}
        for rank, of in enumerate((first[2], last[2]))
    }
    assert blocks == {0: {0, 2}, 1: {1, 3}}
