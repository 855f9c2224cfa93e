"""Epochs and samples per step as other spellings of steps and packs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import leave_process_groups
from omnitrain.recipe import Recipe
from omnitrain.train.epochs import in_steps
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.check import check_recipe
from tests.tiny import tiny_recipe

COUNTED = ["train.steps=1000", "train.epochs=3", "train.samples_per_step=34", "data.packing_buffer=4"]


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.second
def test_a_run_of_epochs_draws_its_rows_so_many_times_in_steps_of_so_many_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_recipe(tmp_path, rows=200, text_only=True)
    recipe = Recipe.load(str(path), COUNTED)
    summary = Trainer(recipe).fit()
    last = lines(tmp_path / "run")[-1]
    assert last["epoch"] == pytest.approx(3, rel=0.1) and last["samples"] == pytest.approx(600, rel=0.1)
    assert last["samples"] / last["step"] == pytest.approx(34, rel=0.1) and last["seconds"] > 0
    saved = Recipe.load(str(tmp_path / "run" / "recipe.yaml")).train
    assert (saved.steps, saved.epochs, saved.samples_per_step) == (summary.step, None, None)
    capsys.readouterr()
    assert check_recipe(recipe) == []
    assert f"{saved.steps} steps of {saved.packs_per_step} packs" in " ".join(capsys.readouterr().out.split())
    assert Trainer(recipe, resume=True).fit().step == summary.step  # finished: the same steps are found again


def test_epochs_of_few_rows_in_many_packs_are_counted(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, rows=40, text_only=True)
    counted = ["train.steps=1000", "train.epochs=3", "train.packs_per_step=8", "data.pack_tokens=512"]
    recipe = in_steps(Recipe.load(str(path), counted))
    Trainer(recipe).fit()
    last = lines(tmp_path / "run")[-1]
    assert (last["samples"], last["epoch"], last["step"]) == (3 * 40, 3, recipe.train.steps)


@pytest.mark.second
def test_samples_and_seconds_go_on_in_a_resumed_run(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, text_only=True, steps=2)
    Trainer(Recipe.load(str(path))).fit()
    Trainer(Recipe.load(str(path), ["train.steps=4"]), resume=True).fit()
    Trainer(Recipe.load(str(path), ["train.steps=4", f"output_dir={tmp_path / 'whole'}"])).fit()
    found, whole = lines(tmp_path / "run"), lines(tmp_path / "whole")
    assert [line["samples"] for line in found] == [line["samples"] for line in whole]
    assert [line["epoch"] for line in found] == [line["samples"] / 28 for line in whole]
    assert sorted(line["seconds"] for line in found) == [line["seconds"] for line in found]


def steps_and_packs(path: Path, overrides: list[str]) -> tuple[int, int]:
    trainer = Trainer(Recipe.load(str(path), overrides))
    trainer.ranks.peers.any(False)  # the first one has the store where the others meet
    train = trainer.recipe.train
    return train.steps, train.packs_per_step


def test_all_ranks_count_the_same_steps(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, rows=200, text_only=True)
    train = in_steps(Recipe.load(str(path), COUNTED)).train
    found = ranks.run(steps_and_packs, path, COUNTED, timeout_s=60, world=2)
    assert found == [(train.steps, train.packs_per_step)] * 2 and train.packs_per_step > 1


@pytest.mark.second
def test_the_command_line_counts_before_it_starts(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, text_only=True)
    overrides = ["train.steps=1000", "train.epochs=1"]
    assert CliRunner().invoke(app, ["run", str(path), *overrides]).exit_code == 0
    again = CliRunner().invoke(app, ["run", str(path), *overrides, "--resume"])
    assert again.exit_code == 0 and "is finished" in again.output
    leave_process_groups()
    refused = CliRunner().invoke(app, ["show", str(path), "--schedule", "train.samples_per_step=4", "--nproc", "2"])
    assert refused.exit_code == 2 and "use train.samples_per_step=null train.packs_per_step=N" in refused.output


def test_data_that_cannot_be_counted_are_named(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, text_only=True)
    with pytest.raises(UserError, match="rejected"):
        in_steps(Recipe.load(str(path), [*COUNTED, "data.pack_tokens=4"]))
