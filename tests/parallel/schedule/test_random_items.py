"""Random steps of encoders on all pipeline ranks: any rank or micro-batch has no item, or many."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from omnitrain.data.packing.sample import Sample
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.pipeline.apply import whole_over_stages
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe.layout import parse_layout
from tests.parallel.schedule.pipelines import build
from tests.parallel.schedule.test_layouts import samples_of
from tests.parallel.step.random_tables import step_batch

MOST_ITEMS, MOST_MICRO_BATCHES, SAMPLED = 40, 4, 5
PATCHES = {  # the module that reads the pixels of a call
    "qwen3_vl_moe": "foundation.model.visual.patch_embed",
    "internvl": "foundation.model.vision_tower.embeddings.patch_embeddings",
}
KEYS = {"foundation.image": "pixel_values", "foundation.video": "pixel_values_videos"}
Drawn = list[list[list[list[Sample]]]]  # [step][data-parallel rank][micro-batch]


class Step(NamedTuple):
    """What a step gave.

    Attributes:
        rows: rows of pixels that this rank encoded, without those of minimal inputs.
        gradients: of a sampled step: parameter -> its gradient.
    """

    rows: int
    gradients: dict[str, torch.Tensor] | None


def random_steps(model: str, number: int, num_ranks: int) -> Drawn:
    """Steps of one to four micro-batches with zero to forty items, text alone, or nothing."""
    rng, every = np.random.default_rng(0), samples_of(model)
    text, media = ([sample for sample in every if bool(sample.spans) == has] for has in (False, True))

    def drawn() -> list[Sample]:
        kind, samples = str(rng.choice(["nothing", "text", "media", "media"])), []
        if kind != "nothing":
            samples.append(text[int(rng.integers(len(text)))])
        left = int(rng.integers(1, MOST_ITEMS + 1)) if kind == "media" else 0
        while left > 0:
            samples.append(media[int(rng.integers(len(media)))])
            left -= len(samples[-1].spans)
        return samples if left == 0 else [*samples[:-1]]

    numbers = [int(rng.integers(1, MOST_MICRO_BATCHES + 1)) for _ in range(number)]
    return [[[drawn() for _ in range(micro_batches)] for _ in range(num_ranks)] for micro_batches in numbers]


def num_rows(samples: list[Sample]) -> int:
    return sum(len(span.item.features[KEYS[span.component]]) for sample in samples for span in sample.spans)


def omni(name: str) -> OmniModel:
    return build_omni_model(foundation=build(name)).train()


def run(name: str, layout: str, steps: Drawn) -> list[Step]:
    """The steps on this rank, without updates."""
    plan = parse_layout(layout).plan()
    state = init_state_of(plan)
    model = build_parallelize_model(omni(name), parallel_plan=plan, enable_mixed_precision=False)
    planner, rows, found = step_planner(model), [], []
    model.get_submodule(PATCHES[name]).register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    for index, step in enumerate(steps):
        batch = step_batch(model, planner, step[state.dp_rank])
        accumulate_gradients(model, batch)
        calls = [
            call
            for k in range(batch.plan.num_micro_batches)
            for call in batch.plan.calls_of(state.rank, "image_encoder", k)
        ]
        minimal = [batch.plan.topology.media[call.call_site] for call in calls if not call.items]
        added = sum(len(model.minimal_input(media)[0][KEYS[media]]) for media in minimal)
        gradients = None
        if index % SAMPLED == 0:
            of_stage = {name: parameter.grad for name, parameter in model.named_parameters()}
            whole = whole_over_stages(of_stage, layout_of(model).pipeline)
            gradients = {name: gradient for name, gradient in whole.items() if gradient is not None}
        found.append(Step(sum(rows) - added, gradients if state.rank == 0 else None))
        rows.clear()
        model.zero_grad(set_to_none=True)
    return found


def require_gradients_of_one_process(name: str, steps: Drawn, found: list[Step]) -> None:
    model = omni(name)
    planner = step_planner(model)
    for index in range(0, len(steps), SAMPLED):
        together = [sample for rank in steps[index] for drawn in rank for sample in drawn]
        accumulate_gradients(model, step_batch(model, planner, [together]))
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        got = found[index].gradients
        assert got is not None
        largest = max((float(g.abs().max()) for g in expected.values()), default=0.0)
        for parameter in got.keys() | expected.keys():
            zeros = torch.zeros_like(got.get(parameter, expected.get(parameter)))
            torch.testing.assert_close(
                got.get(parameter, zeros),
                expected.get(parameter, zeros),
                rtol=1e-5,
                atol=1e-5 * max(largest, 1e-3),
                msg=lambda text, step=index, of=parameter: f"step {step}, {of}: {text}",
            )
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize(
    ("name", "layout", "number"),
    [
        pytest.param("qwen3_vl_moe", "pp2.dp2.ep2.world", 6, marks=pytest.mark.slow),
        pytest.param("internvl", "pp2.tp2.window2.world", 5, marks=pytest.mark.second),
        pytest.param("qwen3_vl_moe", "pp2.dp2.ep2.window2.world", 200, marks=pytest.mark.slow),
        pytest.param("internvl", "pp2.tp2.world", 200, marks=pytest.mark.slow),
    ],
)
def test_random_steps_never_hang_and_encode_each_item_once(
    ranks: RankPool, name: str, layout: str, number: int
) -> None:
    steps = random_steps(name, number, num_ranks=parse_layout(layout).dp_shard)
    items = [sum(len(sample.spans) for sample in drawn) for step in steps for rank in step for drawn in rank]
    assert min(items) == 0 and 20 < max(items) <= MOST_ITEMS
    of_ranks = ranks.run(run, name, layout, steps, timeout_s=60 + 2 * number, world=4)
    for index, step in enumerate(steps):
        held = sum(num_rows(drawn) for rank in step for drawn in rank)
        assert sum(found[index].rows for found in of_ranks) == held, index
    require_gradients_of_one_process(name, steps, of_ranks[0])
