"""A frozen encoder that encodes a step ahead trains the model as one process, also where a run is cut."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from omnitrain.parallel.schedule.graph import StepGraph
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.verify import verify
from omnitrain.plan.schedule.actions import Action
from omnitrain.recipe.layout import parse_layout
from tests.parallel.schedule.separate import factory
from tests.parallel.sections.layouts import samples
from tests.tiny import TASKS, tiny_recipe
from tests.train.test_ranks import assert_same_run, fit

FROZEN = 'parallel.components={"image_encoder":{"freeze":true},"audio_encoder":{"freeze":true}}'
AHEAD = 'parallel.sections={"media":{"components":["image_encoder","audio_encoder"],"ranks":1,"ahead":1}}'
OVERRIDES = [FROZEN, "data.pack_tokens=96", "data.workers=1"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its run on one process is beside it, in ``one``."""
    path = tiny_recipe(tmp_path_factory.mktemp("ahead"), rows=2 * len(TASKS), packs_per_step=4)
    fit(path, [*OVERRIDES, f"output_dir={path.parent / 'one'}"])
    return path


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout", ["vision1.ahead+dp2.accum3", "encoders2.ahead.window2+tp2.accum3", "vision1.ahead.slots1+pp2.accum4"]
)
def test_what_is_encoded_ahead_trains_as_one_process(sections: RankPool, layout: str) -> None:
    report = verify(
        factory("any_to_any", "frozen"),
        samples("any_to_any", "mixed"),
        [parse_layout(layout)],
        nproc=sections.nproc,
        timeout_s=120,
        pool=sections,
    )
    assert [row.status for row in report.rows] == ["equal"], str(report)


def encoded_in_steps(recipe: Path, overrides: list[str], interrupted_at: int) -> list[set[bool]]:
    """A run that goes on after Ctrl-C. For each step in which this rank encodes: whether it is for the next one."""
    steps: dict[StepGraph, set[bool]] = {}
    encode = StepGraph.encode

    def noted(self: StepGraph, action: Action) -> None:
        steps.setdefault(self, set()).add((action.micro_batch or 0) >= self._batch.plan.num_micro_batches)
        encode(self, action)

    with patch.object(StepGraph, "encode", noted):
        fit(recipe, overrides, False, interrupted_at, times=2)
    return list(steps.values())


@pytest.mark.slow  # a teacher does it by default (test_teachers.py)
def test_a_run_that_encodes_ahead_is_that_of_one_process_after_ctrl_c(
    ranks: RankPool, recipe: Path, tmp_path: Path
) -> None:
    """Ctrl-C comes after the second of four steps, so what was encoded for the third one is encoded again."""
    ahead = [*OVERRIDES, AHEAD, f"output_dir={tmp_path / 'run'}"]
    *main, section = ranks.run(encoded_in_steps, recipe, ahead, 2, timeout_s=120, world=3)
    assert main == [[], []]
    assert section == [{False, True}, {True}, {False, True}]
    assert_same_run(tmp_path / "run", recipe.parent / "one")


@pytest.mark.slow
def test_a_run_that_encodes_ahead_goes_on_without_sections(ranks: RankPool, recipe: Path, tmp_path: Path) -> None:
    run = [*OVERRIDES, f"output_dir={tmp_path / 'run'}"]
    ranks.run(fit, recipe, [*run, AHEAD], False, 2, timeout_s=120, world=3)
    ranks.run(fit, recipe, run, True, timeout_s=120, world=2)
    assert_same_run(tmp_path / "run", recipe.parent / "one")
