"""Metrics in programs that draw them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from omnitrain.errors import UserError
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import NonFiniteError, Trainer
from omnitrain.train.verbs.check import check_recipe
from tests.tiny import tiny_recipe


def run(path: Path, *overrides: str, resume: bool = False) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl after a run, or another start of it."""
    recipe = Recipe.load(str(path), ["train.log_every=1", *overrides])
    Trainer(recipe, resume=resume).fit()
    return [json.loads(line) for line in (Path(recipe.output_dir) / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard_shows_the_lines_and_a_resumed_run_goes_on_in_its_curves(tmp_path: Path) -> None:
    recipe, to = tiny_recipe(tmp_path), "train.track.to=[tensorboard]"
    run(recipe, to, "train.steps=2")
    lines = run(recipe, to, "train.steps=4", resume=True)
    drawn = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name, of in (
        ("loss", lambda line: line["loss"]),
        ("heads/text/loss", lambda line: line["heads"]["text"]["loss"]),
    ):
        found = [(event.step, event.value) for event in drawn.Scalars(name)]
        assert found == [(line["step"], pytest.approx(of(line))) for line in lines]


def test_a_session_of_wandb_is_begun_once_and_ended_with_the_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start of the run has its id."""
    told: list[tuple[str, Any]] = []
    program = SimpleNamespace(
        init=lambda **settings: told.append(("init", settings)),
        log=lambda values, step: told.append((f"log {step}", values)),
        finish=lambda exit_code: told.append((f"finish {exit_code}", None)),
    )
    monkeypatch.setitem(sys.modules, "wandb", program)
    recipe, settings = tiny_recipe(tmp_path), ("train.track.to=[wandb]", "train.track.project=digits")
    run(recipe, *settings, "train.steps=1")
    heldout = (f"data.heldout=[{{path: {tmp_path / 'train.parquet'}}}]", "evaluation.max_new_tokens=4")
    lines = run(recipe, *settings, "train.steps=2", *heldout, resume=True)
    assert [what for what, _ in told] == ["init", "log 1", "finish 0", "init", "log 2", "log 2", "finish 0"]
    begun, again = (values for what, values in told if what == "init")
    assert begun["id"] == again["id"] and (begun["project"], begun["name"]) == ("digits", "run")
    assert begun["config"]["train"]["steps"] == 1
    assert told[4][1]["loss"] == lines[1]["loss"] and told[5][1]["scores/seconds"] > 0


def test_runs_of_one_name_have_curves_of_their_own_in_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on in the run of the name that it is given."""
    names: list[str] = []
    works = dict.fromkeys(("log", "finish"), lambda *_, **__: None)
    program = SimpleNamespace(**works, init=lambda **settings: names.append(settings["name"]))
    monkeypatch.setitem(sys.modules, "trackio", program)
    recipe, to = tiny_recipe(tmp_path), "train.track.to=[trackio]"
    run(recipe, to, "train.steps=1")
    run(recipe, to, "train.steps=2", resume=True)
    run(recipe, to, "train.steps=1")
    assert names[0] == names[1] != names[2] and all(name.startswith("run-") for name in names)


def test_a_program_that_is_not_installed_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    recipe = Recipe.load(str(tiny_recipe(tmp_path)), ["train.track.to=[trackio]"])
    with pytest.raises(
        UserError, match=r"train.track.to: 'trackio' is not installed \(.*\); pip install 'omnitrain\[trackio"
    ):
        Trainer(recipe)
    assert [problem for problem in check_recipe(recipe) if "pip install 'omnitrain[trackio]'" in problem]
    assert not (tmp_path / "run").exists()


def test_a_run_that_an_error_ends_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    works = dict.fromkeys(("init", "log"), lambda *_, **__: None)
    program = SimpleNamespace(**works, finish=lambda exit_code: codes.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", program)
    with pytest.raises(NonFiniteError):
        run(tiny_recipe(tmp_path), "train.track.to=[wandb]", "train.optimizer.learning_rate=1e30", "train.steps=9")
    assert codes == [1]


def raises(*_: Any, **__: Any) -> None:
    raise RuntimeError("no server")


@pytest.mark.parametrize("fails", ["log", "finish"])
def test_a_program_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: str
) -> None:
    works = dict.fromkeys(("init", "log", "finish"), lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(**works | {fails: raises}))
    lines = run(tiny_recipe(tmp_path), "train.track.to=[wandb, tensorboard]", "train.steps=2")
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("train.track: wandb failed (RuntimeError: no server)") == 1 and len(lines) == 2
    drawn = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in drawn.Scalars("loss")] == [1, 2]


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_program_that_cannot_begin_is_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=raises))
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", raises)
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(UserError, match=rf"train.track.to: '{name}' cannot start \(RuntimeError: no server\)"):
        run(recipe, f"train.track.to=[{name}]")
    assert len(run(recipe, "train.steps=1")) == 1  # nothing of it is in the way
