"""`quadratic_cost: measured`: fitted in the first steps, and the same for all ranks from a fixed step on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from omnitrain.ops.timing import Recorded, Span, What
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step import item_costs
from omnitrain.plan.item_cost import Encoded
from omnitrain.recipe import ParallelPlan, Recipe
from omnitrain.recipe.parallel import ComponentPlan
from omnitrain.train import measures
from omnitrain.train.trainer import Trainer
from tests.tiny import tiny_recipe
from tests.train.test_ranks import fit, metrics

FOUND = 0.5
ENCODER = "parallel.components.image_encoder"
FOUNDATION = "parallel.components.foundation"
PLACED = [f"{ENCODER}.place=world", "train.optimizer.schedule=constant"]
MEASURED = [*PLACED, f"{ENCODER}.quadratic_cost=measured"]
FAST = {"MEASURED_STEPS": 2, "WARM_UP": 1, "UNUSED_STEPS": 3}  # in place of 16, 4 and 32


def costs_of_steps(
    recipe: Path, overrides: list[str], resume: bool, interrupted_at: int | None = None
) -> tuple[list[list[int]], list[Encoded]]:
    """A run in which the fit gives ``FOUND``: the costs of all items in each step, and what was measured.

    With ``interrupted_at``, Ctrl-C comes at the end of that step, and the same trainer goes on.
    """
    costs, measured = [], []

    def fitted(rows: list[Encoded]) -> float:
        measured.extend(rows)
        return FOUND

    with patch.multiple(measures, fitted_quadratic=fitted, **FAST):
        trainer = Trainer(Recipe.load(str(recipe), overrides), resume=resume)
        inner = trainer.train_step

        def train_step(batch: Any) -> tuple[float, float]:
            costs.append(batch.plan.cost.tolist())
            result = inner(batch)
            if trainer.step == interrupted_at and trainer.ranks.is_first:
                os.kill(os.getpid(), signal.SIGINT)
            return result

        trainer.train_step = train_step
        if trainer.fit().interrupted:
            trainer.fit()
    return costs, measured


@pytest.mark.second
def test_costs_are_measured_once_and_a_resumed_run_plans_the_same(ranks: RankPool, tmp_path: Path) -> None:
    unused = FAST["UNUSED_STEPS"]
    recipe = tiny_recipe(tmp_path)
    short, long = ([*MEASURED, f"train.steps={steps}"] for steps in (unused + 1, unused + 3))
    (first, measured), (other, _) = ranks.run(costs_of_steps, recipe, short, False, timeout_s=120, world=2)
    assert first == other and len(measured) == 2 * (FAST["MEASURED_STEPS"] - FAST["WARM_UP"])
    assert all(row.seconds > 0 and row.calls >= 1 for row in measured)
    linear = set().union(*first[:unused])
    assert set(first[unused]) <= {cost + round(FOUND * cost**2) for cost in linear} | linear
    assert max(first[unused]) > max(linear)
    saved = tmp_path / "run" / "checkpoints" / f"step-{unused + 1:08d}" / "trainer.pt"
    state = torch.load(saved, weights_only=True)["state"]
    assert state["quadratic_costs"] == {"image_encoder": FOUND} and state["measured_costs_unused_until"] == unused
    kept = Recipe.load(str(tmp_path / "run" / "recipe.yaml")).parallel.components["image_encoder"]
    assert kept.quadratic_cost == FOUND
    (more, again), _ = ranks.run(costs_of_steps, recipe, long, True, timeout_s=120, world=2)
    assert again == [] and len(more) == 2 and all(max(costs) > max(linear) for costs in more)
    plain = [*PLACED, long[-1], f"output_dir={tmp_path / 'plain'}"]
    ranks.run(fit, recipe, plain, timeout_s=120, world=2)
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("run", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) > 1


@pytest.mark.parametrize("interrupted_at", [1, 3])
@pytest.mark.second
def test_a_trainer_that_goes_on_after_ctrl_c_uses_costs_from_the_same_step(
    ranks: RankPool, tmp_path: Path, interrupted_at: int
) -> None:
    """Ctrl-C comes before and after the costs are known."""
    unused = FAST["UNUSED_STEPS"]
    recipe, steps = tiny_recipe(tmp_path), [*MEASURED, "data.workers=1", f"train.steps={unused + 2}"]
    (costs, measured), _ = ranks.run(costs_of_steps, recipe, steps, False, interrupted_at, timeout_s=120, world=2)
    linear = max(max(of_step) for of_step in costs[:unused])
    assert len(costs) == unused + 2 and len(measured) == 2 * (FAST["MEASURED_STEPS"] - FAST["WARM_UP"])
    assert [max(of_step) > linear for of_step in costs] == [False] * unused + [True] * 2


@pytest.mark.second
def test_a_run_that_begins_to_measure_when_it_is_resumed_uses_costs_as_many_steps_later(
    ranks: RankPool, tmp_path: Path
) -> None:
    before, unused = 2, FAST["UNUSED_STEPS"]
    recipe = tiny_recipe(tmp_path)
    ranks.run(costs_of_steps, recipe, [*PLACED, f"train.steps={before}"], False, timeout_s=120, world=2)
    steps = [*MEASURED, f"train.steps={before + unused + 1}"]
    (costs, measured), _ = ranks.run(costs_of_steps, recipe, steps, True, timeout_s=120, world=2)
    assert len(measured) == 2 * (FAST["MEASURED_STEPS"] - FAST["WARM_UP"]) and len(costs) == unused + 1
    assert max(costs[-1]) > max(max(of_step) for of_step in costs[:-1])


@pytest.mark.second
def test_the_cost_of_samples_is_measured_like_that_of_items_and_a_resumed_run_deals_the_same(
    ranks: RankPool, tmp_path: Path
) -> None:
    unused, recipe = FAST["UNUSED_STEPS"], tiny_recipe(tmp_path)
    dealt = [f"{FOUNDATION}.place=world", f"{FOUNDATION}.quadratic_cost=measured", "train.packs_per_step=4"]
    short, long = ([*dealt, f"train.steps={steps}"] for steps in (unused + 1, unused + 3))
    (_, measured), (_, other) = ranks.run(costs_of_steps, recipe, short, False, timeout_s=120, world=2)
    assert measured == other and len(measured) == 2 * (FAST["MEASURED_STEPS"] - FAST["WARM_UP"])
    assert [(row.calls, row.squares > row.elements > 0, row.seconds > 0) for row in measured] == [
        (4, True, True)
    ] * len(measured), measured
    half = len(measured) // 2
    of_ranks = [[(row.elements, row.squares) for row in rows] for rows in (measured[:half], measured[half:])]
    assert of_ranks[0] == of_ranks[1]  # each rank waits for the one with the longest samples
    saved = tmp_path / "run" / "checkpoints" / f"step-{unused + 1:08d}" / "trainer.pt"
    state = torch.load(saved, weights_only=True)["state"]
    assert state["quadratic_costs"] == {"foundation": FOUND}
    seconds = state["section_seconds"]
    assert {"foundation", "image_encoder"} <= seconds.keys() and all(found > 0 for found in seconds.values())
    kept = Recipe.load(str(tmp_path / "run" / "recipe.yaml")).parallel.components["foundation"]
    assert (kept.place, kept.quadratic_cost) == ("world", FOUND)
    (_, again), _ = ranks.run(costs_of_steps, recipe, long, True, timeout_s=120, world=2)
    assert again == []


def test_costs_are_measured_and_used_in_the_steps_that_the_documentation_names() -> None:
    assert (item_costs.WARM_UP + 1, item_costs.MEASURED_STEPS, item_costs.UNUSED_STEPS + 1) == (5, 16, 33)


def test_a_backward_that_encodes_again_does_not_make_a_section_look_slower() -> None:
    forward, again = (What("compute", "encode", phase, "image_encoder") for phase in ("forward", "backward"))
    actions = {name: What("action", f"{name}@image_encoder") for name in ("ENCODE0", "ENCODE_B0", "SEND_F0>0")}
    spans = [(forward, 0, 1), (actions["ENCODE0"], 0, 1), (actions["SEND_F0>0"], 1, 3)]
    spans += [(again, 4, 5), (actions["ENCODE_B0"], 4, 7)]
    recorded = Recorded(0.0, 7.0, tuple(Span(*span) for span in spans))
    assert measures.seconds_of_forwards(recorded, "image_encoder", has_actions=True) == 1
    assert measures.seconds_of_forwards(recorded, "audio_encoder", has_actions=True) == 0


def test_encoders_inside_of_forwards_do_not_count_as_the_foundation() -> None:
    encode = What("compute", "encode", "forward", "image_encoder")

    def recorded(*actions: tuple[str, float, float]) -> Recorded:
        spans = [Span(What("action", name), start, end) for name, start, end in actions]
        return Recorded(0.0, 9.0, (Span(encode, 0.0, 1.0), *spans))

    apart = recorded(("0F0", 0, 3), ("0B0", 3, 9))
    together = recorded(("0F0", 0, 3), ("(0F1;0B0)OVERLAP_F_B", 3, 9))
    found = [
        measures.foundation_seconds([span for span in one.spans if span.what.kind == "action"], one, inside)
        for one, inside in ((apart, ["image_encoder"]), (together, ["image_encoder"]), (apart, []))
    ]
    assert found == [6.0, 6.0, 9.0]


def test_a_default_plan_measures_only_encoders_whose_items_are_divided(ranks: RankPool, tmp_path: Path) -> None:
    """The recipe that the run writes can be loaded: the foundation has no cost of items."""
    recipe, unused = tiny_recipe(tmp_path), FAST["UNUSED_STEPS"]
    overrides = [*PLACED, "parallel.default.quadratic_cost=measured", f"train.steps={unused}"]
    ranks.run(costs_of_steps, recipe, overrides, False, timeout_s=120, world=2)
    kept = Recipe.load(str(tmp_path / "run" / "recipe.yaml")).parallel
    assert kept.components["image_encoder"].quadratic_cost == FOUND
    assert {name for name, plan in kept.components.items() if plan.quadratic_cost is not None} == {"image_encoder"}


def test_a_number_that_the_plan_gives_is_not_replaced_by_a_measured_one() -> None:
    measured, given = ComponentPlan(quadratic_cost="measured"), ComponentPlan(quadratic_cost=0.25)
    plan = ParallelPlan(components={"image_encoder": measured, "audio_encoder": given})
    found = plan.with_numbers(
        "quadratic_cost", "measured", dict.fromkeys(("image_encoder", "audio_encoder", "video_encoder"), 0.5)
    )
    assert {name: c.quadratic_cost for name, c in found.components.items()} == {
        "image_encoder": 0.5,
        "audio_encoder": 0.25,
    }
