"""Answers, scores and samples while a run goes on, in files and in trackers."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.evaluate.evaluate import Answered
from omnitrain.train.trainer import RunSummary, Trainer
from tests.tiny import tiny_recipe

EVERY = "evaluation={every: 2, max_new_tokens: 8, examples_per_source: 1, saved_samples: 1}"


def lines(run: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.second
def test_answers_and_scores_during_a_run_change_nothing_of_its_training(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, evaluated=True, steps=5)
    Trainer(Recipe.load(str(path), [f"output_dir={tmp_path / 'plain'}"])).fit()
    trainer = Trainer(Recipe.load(str(path), [EVERY, "train.track.to=[tensorboard]"]))
    trainer.fit()
    run = tmp_path / "run"
    found = lines(run)
    assert [line["loss"] for line in found] == [line["loss"] for line in lines(tmp_path / "plain")]
    assert [line["step"] for line in found if "scores" in line] == [2, 4]
    assert all("text" in line["scores"] and line["heldout"]["loss"] for line in (found[1], found[3]))
    assert [line["step"] for line in lines(run, "evaluations")] == [2, 4, 5] and not trainer.model.training
    samples = {
        name: json.loads((run / "samples" / name / "samples.json").read_text())["samples"]
        for name in ("step-00000002", "step-00000004", ".")
    }
    assert all(len(of_step) == 7 for of_step in samples.values())
    by_source = {sample["source"]: sample for sample in samples["step-00000002"]}
    (reference,) = by_source["text_to_image"]["reference_parts"]
    assert (run / "samples" / "step-00000002" / reference["file"]).is_file()
    drawn = EventAccumulator(str(run / "tensorboard")).Reload()
    tags = drawn.Tags()
    assert {"samples/text_to_image 1/reference 0", "samples/image_to_text 1/prompt 0"} <= set(tags["images"])
    assert {"samples/image_to_speech 1/reference 0", "samples/speech_to_text 1/prompt 0"} <= set(tags["audio"])
    assert [event.step for event in drawn.Images("samples/image_to_text 1/prompt 0")] == [2, 4, 5]
    assert any("text 1/reference" in tag for tag in tags["tensors"])


def score(answers: list[Answered]) -> dict[str, float]:
    return {"answers": float(len(answers))}


@pytest.mark.second
def test_a_session_shows_answers_beside_their_references_and_goes_on_if_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[tuple[int, dict[str, Any]]] = []
    makes = {name: (lambda value=None, name=name, **settings: (name, settings)) for name in ("Table", "Image", "Audio")}
    program = SimpleNamespace(
        **makes, init=lambda **_: None, finish=lambda **_: None, log=lambda values, step: logged.append((step, values))
    )
    monkeypatch.setitem(sys.modules, "wandb", program)
    path = tiny_recipe(tmp_path, evaluated=True, steps=2)
    Trainer(Recipe.load(str(path), [EVERY, "train.track.to=[wandb]"])).fit()
    (step, samples), (_, scores) = logged[-2:]  # behind two lines of metrics
    assert step == 2 and scores.keys() >= {"scores/seconds"}
    assert not samples.keys() & logged[0][1].keys()  # a name is a number in all steps, or in none
    kind, settings = samples["samples/texts"]
    assert kind == "Table" and settings["columns"] == ["sample", "prompt", "answer", "reference"]
    texts = {name: (prompt, reference) for name, prompt, _, reference in settings["data"]}
    assert len(texts) == 7 and texts["text 1"] == ("what is it", "0") and texts["text_to_image 1"][1] == ""
    assert samples["samples/text_to_image 1/reference 0"] == ("Image", {"caption": "reference"})
    assert samples["samples/image_to_speech 1/reference 0"] == ("Audio", {"caption": "reference", "sample_rate": 8000})
    del program.Audio
    Trainer(Recipe.load(str(path), [EVERY, "train.track.to=[wandb]"])).fit()
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("wandb failed (AttributeError") == 1 and "gets no more samples; samples/ has all of them" in told
    assert "scores/seconds" in logged[-1][1]


def test_a_score_of_answers_stops_a_run_early_and_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_recipe(tmp_path, evaluated=True, text_only=True, steps=9)
    stopping = "train.early_stopping={metric: scores.answers, mode: max, patience: 2}"
    with pytest.raises(UserError, match=r"needs `evaluation\.every`"):
        Recipe.load(str(path), [stopping])
    summary = Trainer(Recipe.load(str(path), [EVERY, stopping, f"evaluation.scorer={__name__}:score"])).fit()
    assert summary.step == 6 and "scores.answers has not improved in 2" in str(summary.stopped)
    assert summary.scores["answers"] == 1
    assert [line["step"] for line in lines(tmp_path / "run", "evaluations")] == [2, 4, 6]


def fit(path: Path, overrides: list[str], interrupted: bool) -> RunSummary:
    """The last rank gets Ctrl-C in the evaluation of step 2."""
    trainer = Trainer(Recipe.load(str(path), overrides))
    assert trainer.evaluator is not None
    evaluate = trainer.evaluator.evaluate

    def with_ctrl_c(notify: Any, *arguments: Any) -> Any:
        if trainer.ranks.peers.rank == trainer.ranks.peers.size - 1 and interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(notify, *arguments)

    trainer.evaluator.evaluate = with_ctrl_c
    return trainer.fit()


def test_ranks_evaluate_during_the_run_as_one_process_and_stop_together(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, evaluated=True, text_only=True, steps=3, packs_per_step=2)
    several = EVERY.replace("examples_per_source: 1", "examples_per_source: 4")
    fit(path, [several, f"output_dir={tmp_path / 'one'}"], False)
    first, second = ranks.run(fit, path, [several], False, timeout_s=60, world=2)
    assert first.step == second.step == 3 and first.scores.keys() == second.scores.keys()
    for found, wanted in zip(*(lines(tmp_path / name, "evaluations") for name in ("run", "one")), strict=True):
        assert {key: found[key] for key in ("step", "text")} == {key: wanted[key] for key in ("step", "text")}
    ended = ranks.run(fit, path, [several], True, timeout_s=60, world=2)
    assert [(one.interrupted, one.step) for one in ended] == [(True, 2)] * 2
