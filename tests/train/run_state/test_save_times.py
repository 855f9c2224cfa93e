from __future__ import annotations

from typing import Any, Literal

import pytest

from omnitrain.recipe import Recipe
from omnitrain.train import saves
from omnitrain.train.saves import SaveTimes

Every = int | Literal["auto"] | None


def recipe(**train: Any) -> Recipe:
    """A recipe of which only ``train`` matters."""
    tree = {"model": {"checkpoint": "saved"}, "data": {"train": [{"path": "rows.parquet"}]}, "train": train}
    return Recipe.model_validate(tree)


class Run:
    """Saves when it is due; a clock stands still between its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every: Every, steps: int, **save: Any) -> None:
        self.now, self.steps = 0.0, steps
        monkeypatch.setattr(saves.time, "monotonic", lambda: self.now)
        self.times = SaveTimes(
            recipe(steps=steps, log_every=save.pop("log_every", 1), save={"every": every, **save}), 0
        )

    def saved(self, step_seconds: float, save_seconds: float) -> list[int]:
        found = []
        for step in range(1, self.steps + 1):
            self.now += step_seconds
            if self.times.is_due(step):
                found.append(step)
                self.times.begin(step)
                self.now += save_seconds
                self.times.end()
        return found


@pytest.mark.parametrize(
    ("every", "steps", "step_seconds", "save_seconds", "saved"),
    [
        ("auto", 1000, 0.5, 5, []),  # shorter than ten minutes
        ("auto", 1000, 3, 5, [200, 400, 600, 800]),  # every ten minutes
        ("auto", 1000, 3, 45, [200, 400, 600, 800]),  # ten minutes are more than a tenth
        ("auto", 10_000, 3, 45, [200, *range(500, 10_000, 300)]),  # every 20 x 45 s, so that saving takes 5 %
        ("auto", 1000, 60, 300, [10, *range(110, 1000, 100)]),  # a tenth is sooner than 20 x 300 s
        ("auto", 4, 700, 5, [1, 2, 3]),  # steps of more than ten minutes, none twice
        (2, 5, 0.1, 5, [2, 4]),
        (None, 5, 700, 5, []),
    ],
)
def test_a_crash_costs_ten_minutes_or_a_tenth_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
    every: Every,
    steps: int,
    step_seconds: float,
    save_seconds: float,
    saved: list[int],
) -> None:
    assert Run(monkeypatch, every, steps).saved(step_seconds, save_seconds) == saved


def test_a_checkpoint_that_is_kept_forever_is_saved_whatever_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for every, saved in (("auto", [300, 600, 900]), (200, [200, 300, 400, 600, 800, 900]), (None, [300, 600, 900])):
        assert Run(monkeypatch, every, 1000, keep_every=300).saved(0.1, 5) == saved


def test_a_checkpoint_to_compare_waits_for_its_loss_but_not_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes are 200 steps."""
    assert Run(monkeypatch, "auto", 1000, keep_best="loss", log_every=150).saved(3, 0) == [300, 600, 900]
    assert Run(monkeypatch, "auto", 1000, keep_best="loss", log_every=900).saved(3, 0) == [400, 800]


def test_a_resumed_run_counts_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves.time, "monotonic", lambda: 5000.0)
    times = SaveTimes(recipe(steps=100), 90)
    assert not times.is_due(91)
    monkeypatch.setattr(saves.time, "monotonic", lambda: 5600.0)
    assert times.is_due(92)
