"""The trainer evaluates on the ranks of ``main`` while its sections encode for them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import RunSummary, Trainer
from tests.parallel.schedule import test_inference
from tests.tiny import TASKS, tiny_recipe
from tests.train.test_ranks import TWO_SLOTS, assert_same_run, fit

SECTION = 'parallel.sections={"media":{"components":["image_encoder","audio_encoder"],"ranks":1}}'
EVALUATED = ["evaluation.max_new_tokens=3", "evaluation.loss_every=2", "evaluation.batch_size=5"]


def scored_by(name: str) -> str:
    return f"evaluation.scorer={test_inference.__name__}:{name}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(tmp_path_factory.mktemp("sections"), rows=2 * len(TASKS), evaluated=True)


@pytest.mark.second
def test_a_run_with_a_section_has_the_heldout_losses_and_scores_of_one_process(
    ranks: RankPool, recipe: Path, tmp_path: Path
) -> None:
    arguments = [*TWO_SLOTS, *EVALUATED, scored_by("score")]
    alone = fit(recipe, [f"output_dir={tmp_path / 'one'}", *arguments])
    arguments += [f"output_dir={tmp_path / 'three'}", SECTION]
    summaries = ranks.run(fit, recipe, arguments, timeout_s=120, world=3)
    assert_same_run(tmp_path / "three", tmp_path / "one")
    scores = [{name: score for name, score in one.scores.items() if name != "seconds"} for one in (alone, *summaries)]
    assert scores == [scores[0]] * 4 and scores[0]["sum"] > 0
    losses = [json.loads((tmp_path / run / "eval.json").read_text())["losses"] for run in ("one", "three")]
    assert test_inference.flat(losses[1]) == pytest.approx(test_inference.flat(losses[0]), rel=1e-5)


@pytest.mark.second
def test_a_failing_scorer_ends_the_ranks_of_sections_too(ranks: RankPool, recipe: Path, tmp_path: Path) -> None:
    arguments = [*TWO_SLOTS, *EVALUATED, scored_by("no_score"), f"output_dir={tmp_path / 'run'}", SECTION]
    with pytest.raises(RankError, match=r"failed on 3 of 3 ranks[^$]*KeyError: '14 answers'"):
        ranks.run(fit, recipe, arguments, timeout_s=60, world=3)


def fit_twice(recipe: Path, overrides: Sequence[str], interrupted: Sequence[str]) -> list[RunSummary]:
    """The second rank gets Ctrl-C in the middle of its first evaluation by each of these methods."""
    trainer = Trainer(Recipe.load(str(recipe), list(overrides)))
    evaluator = trainer.evaluator
    assert evaluator is not None

    def with_ctrl_c(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def once(notify: Callable[[str], None], *arguments: Any) -> Any:
            setattr(evaluator, evaluate.__name__, evaluate)

            def and_ctrl_c(doing: str) -> None:
                if doing.startswith(("held-out loss", "answers, batch 2")):
                    os.kill(os.getpid(), signal.SIGINT)
                notify(doing)

            return evaluate(and_ctrl_c, *arguments)

        return once

    if trainer.ranks.peers.rank == 1:
        for name in interrupted:
            setattr(evaluator, name, with_ctrl_c(getattr(evaluator, name)))
    return [trainer.fit() for _ in range(2)]


@pytest.mark.parametrize(
    ("method", "step"),
    [pytest.param("losses", 2, marks=pytest.mark.second), pytest.param("evaluate", 4, marks=pytest.mark.slow)],
)
def test_ctrl_c_in_an_evaluation_ends_all_ranks_together_and_the_run_can_go_on(
    ranks: RankPool, recipe: Path, tmp_path: Path, method: str, step: int
) -> None:
    arguments = [*TWO_SLOTS, *EVALUATED, f"output_dir={tmp_path / 'run'}", SECTION]
    for first, second in ranks.run(fit_twice, recipe, arguments, [method], timeout_s=120, world=3):
        assert (first.interrupted, first.step, first.scores) == (True, step, {})
        assert (second.interrupted, second.step) == (False, 4)
        assert second.scores.keys() > {"seconds"}
