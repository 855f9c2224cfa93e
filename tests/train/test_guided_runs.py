"""Runs that drop conditions and evaluate with guidance: on any ranks those of one process, and what reads them then."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.train.trainer import RunSummary
from tests.parallel.schedule.test_inference import score
from tests.tiny import TASKS, tiny_recipe
from tests.train.test_ranks import TWO_SLOTS, assert_same_run, fit

GUIDED = [
    "data.condition_dropout=0.5",
    "evaluation.sampling={text: {guidance: 2}, image_decoder: {guidance: 3}, audio_decoder: {guidance: 1.5}}",
    "evaluation.max_new_tokens=20",
    f"evaluation.scorer={score.__module__}:score",
]
SECTION = 'parallel.sections={"media":{"components":["image_encoder","audio_encoder"],"ranks":1}}'


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunSummary]:
    """The recipe, and beside it ``one``, its run in one process."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("guided"), rows=2 * len(TASKS), evaluated=True)
    return recipe, fit(recipe, [*TWO_SLOTS, *GUIDED, f"output_dir={recipe.parent / 'one'}"])


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, "parallel.components.foundation.pp=2", id="pp2", marks=pytest.mark.second),
        pytest.param(2, "train.seed=0", id="dp2", marks=pytest.mark.slow),
        pytest.param(4, "parallel.default.ulysses=2", id="dp2.sp2", marks=pytest.mark.slow),
        pytest.param(4, "parallel.components.foundation.tp=2", id="dp2.tp2", marks=pytest.mark.slow),
        pytest.param(3, SECTION, id="section", marks=pytest.mark.slow),
    ],
)
def test_ranks_drop_the_same_conditions_and_answer_alike(
    ranks: RankPool, one: tuple[Path, RunSummary], tmp_path: Path, world: int, layout: str
) -> None:
    recipe, alone = one
    arguments = [*TWO_SLOTS, *GUIDED, layout, f"output_dir={tmp_path / 'run'}"]
    (first, *_) = ranks.run(fit, recipe, arguments, timeout_s=120, world=world)
    assert_same_run(tmp_path / "run", recipe.parent / "one")
    assert first.scores["sum"] == alone.scores["sum"] > 0


@pytest.mark.second
def test_a_checkpoint_tells_that_it_may_be_guided(one: tuple[Path, RunSummary], tmp_path: Path) -> None:
    run = one[0].parent / "one"
    assert json.loads((one[1].checkpoint / "config.json").read_text())["condition_dropout"] is True
    arguments = ["generate", str(run), "--prompt", "what is it", "--guidance", "3", "--max-new-tokens", "4"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output


def test_guidance_of_a_model_without_decoders_is_refused(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True, steps=1)
    fit(recipe, [])
    done = CliRunner().invoke(app, ["generate", str(tmp_path / "run"), "--prompt", "a", "--guidance", "2"])
    assert done.exit_code == 2 and "guidance 2: the model writes no media; leave it out" in done.output
