"""The collectives that a plan implies are those that every rank issues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from omnitrain.models.hf.samples import to_samples
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.schedule.graph import StepGraph
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import step_planner
from tests.parallel.factories import any_to_any, qwen3_vl
from tests.parallel.laid_out import laid_out, samples
from tests.parallel.step.random_tables import RANKS, Step, random_steps, step_batch
from tests.parallel.step.replay import differences, record
from tests.parallel.verify.test_verify import hf_samples

MIXED = {
    "image_encoder": {"mode": "hsdp", "dp_replicate": 2, "place": "world"},
    "audio_encoder": {"mode": "replicate"},
    "audio_decoder": {"dp_replicate": 4},
}
WORLD = {name: {"place": "world"} for name in ("image_encoder", "audio_encoder")}
FROZEN = {"image_encoder": {"freeze": True, "place": "world"}, "foundation": {"freeze": True}}


def replayed(model: OmniModel, steps: list[Step]) -> tuple[int, list[str]]:
    """Number of collectives of a rank in all steps, and what differs from the plans."""
    rank = torch.distributed.get_rank()
    units = {name: component.units for name, component in layout_of(model).components.items()}
    planner = step_planner(model)
    number, found = 0, []
    for index, drawn in enumerate(steps):
        batch = step_batch(model, planner, drawn[rank])
        events = record(model, batch)
        number += len(events)
        found += [f"step {index}, {text}" for text in differences(batch.plan, rank, units, events)]
    return number, found


def any_to_any_replayed(steps: list[Step], components: dict[str, Any], state: dict[str, int]) -> tuple[int, list[str]]:
    return replayed(laid_out(None, components, state), steps)


def qwen3_vl_replayed(steps: list[Step]) -> tuple[int, list[str]]:
    return replayed(laid_out(model=qwen3_vl().train()), steps)


@pytest.mark.parametrize(
    ("components", "state"),
    [
        pytest.param({}, {}, id="dp4", marks=pytest.mark.slow),
        pytest.param(WORLD, {"dp_replicate_size": 2}, id="hsdp2x2.world", marks=pytest.mark.slow),
        pytest.param(MIXED, {}, id="a mesh for each"),
        pytest.param(FROZEN, {}, id="frozen", marks=pytest.mark.second),
    ],
)
def test_every_rank_issues_the_collectives_that_its_plan_implies(
    ranks: RankPool, components: dict[str, Any], state: dict[str, int]
) -> None:
    steps = random_steps(any_to_any(), 3, seed=1)
    results = ranks.run(any_to_any_replayed, steps, components, state, timeout_s=120, world=RANKS)
    assert [found for _, found in results] == [[]] * RANKS
    assert all(number > 50 for number, _ in results)


def test_a_tower_inside_a_hf_model_is_called_alike_for_images_and_videos(ranks: RankPool) -> None:
    """Two calls in a micro-batch: gathered for each, reduced once."""
    drawn = to_samples(build_omni_model(foundation=qwen3_vl()).runner.native, hf_samples("qwen3_vl"))
    text = [sample for sample in drawn if not sample.spans]
    results = ranks.run(qwen3_vl_replayed, [[[drawn, text], [text, drawn]]], timeout_s=60, world=2)
    assert [found for _, found in results] == [[], []]
    # Forward: 3 units of the tower twice, 3 of the foundation. Backward: its 2 blocks, the tower and its 2 blocks twice
    # are gathered again, 6 units reduced. In two micro-batches.
    assert {number for number, _ in results} == {2 * (2 * 3 + 3 + 2 + 1 + 2 * 2 + 6)}


def with_mistakes(table: Step) -> dict[str, list[str]]:
    """What the replay finds if ranks 2 and 3 leave out the image tower once, and if the plan is another one."""
    model, rank = laid_out(state={"dp_replicate_size": 2}), torch.distributed.get_rank()
    units = {name: component.units for name, component in layout_of(model).components.items()}
    batch = step_batch(model, step_planner(model), table[rank])
    is_encoded = StepGraph._is_encoded

    def skipping(steps: StepGraph, component: str, window: int) -> bool:
        return is_encoded(steps, component, window) and not (rank >= 2 and window == 0)

    with patch.object(StepGraph, "_is_encoded", skipping):
        skipped = differences(batch.plan, rank, units, record(model, batch))
    events = record(model, batch)
    call_sites = [call_site.name for call_site in batch.plan.topology.call_sites]
    more, less = batch.plan.calls.copy(), batch.plan.calls.copy()
    more[1, call_sites.index("image_encoder")], less[1, call_sites.index("image_encoder")] = 2, 0
    return {
        "skipped": skipped,
        "no mistake": differences(batch.plan, rank, units, events),
        "one more": differences(replace(batch.plan, calls=more), rank, units, events),
        "one less": differences(replace(batch.plan, calls=less), rank, units, events),
    }


def test_the_replay_finds_a_skipped_component_and_a_wrong_plan(ranks: RankPool) -> None:
    """Of two replicas, one leaves out the tower where it is not reduced: nothing hangs, no gradient is wrong."""
    image, text = samples("image_to_text"), samples("text")
    found = ranks.run(with_mistakes, [[image, image], *[[text, text]] * 3], timeout_s=60, world=RANKS)
    assert [rank["no mistake"] for rank in found] == [[]] * RANKS
    assert [bool(rank["skipped"]) for rank in found] == [False, False, True, True]
    first = "micro-batch 0, forward, collective 0: planned gather image_encoder, ran gather foundation"
    assert found[2]["skipped"][0] == first
    for rank in found:
        assert (
            "micro-batch 1, forward, collective 2: planned gather image_encoder, ran gather foundation"
            in rank["one more"]
        )
        too_early = "micro-batch 0, image_encoder, collective 3: planned all_reduce image_encoder, ran none"
        assert too_early in rank["one less"]
