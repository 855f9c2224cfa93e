"""The page about runs: what it shows equals what the runs wrote, and it needs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.errors import UserError
from omnitrain.recipe import Recipe
from omnitrain.report import write as write_module
from omnitrain.report.media import spectrogram
from omnitrain.report.write import write_report
from omnitrain.train.metrics.console import console
from omnitrain.train.trainer import Trainer
from tests.report.parsed import Page, self_contained
from tests.report.runs import line, save_run, save_samples, whole_run
from tests.tiny import tiny_recipe

CHAPTERS = ["overview", "loss", "heldout", "samples", "optimizer", "speed", "packing", "others", "step", "layout"]
CHAPTERS += ["recipe", "environment"]


def page(*runs: Path) -> Page:
    """The page about runs."""
    return self_contained(write_report(runs, runs[0] / "report.html"))


def test_every_chapter_shows_the_numbers_that_the_run_wrote(tmp_path: Path) -> None:
    found = page(whole_run(tmp_path / "run"))
    assert list(found.numbers) == CHAPTERS
    first, last = (json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[::2])
    for chapter, keys in {"loss": ["loss"], "optimizer": ["learning_rate"], "speed": ["tokens_per_second"]}.items():
        for key in keys:
            assert {first[key], last[key]} <= set(found.numbers[chapter])
    assert found.numbers["overview"] == [3, 9, 12.5 / 3, 4.125, 1003.0, 512.5, 0, 2]
    assert found.numbers["loss"] == [12.5, 12.5 / 3, 12.5 / 3, 12.5, *2 * [6.0, 2.0, 2.0, 6.0]]
    assert found.numbers["heldout"] == [*[4.125] * 8, 0.25, 0.625, 0.25, 0.625]
    assert {0.125, 512.5, 0.375} <= set(found.numbers["speed"])
    assert {17, 340, 11, 44, 13} <= set(found.numbers["packing"]) and "unreadable image" in found.words["packing"]
    assert {0.75, 1.125, 7, 0, 1.25, 1.75, 0.5, 2.5, 64, 32.0, 0.0625, 3, 5} <= set(found.numbers["packing"])
    assert found.numbers["others"] == [41.5] * 4
    assert (
        "because" in found.words["samples"] and "why not" in found.words["samples"] and "so" in found.words["samples"]
    )
    assert found.counts["audio"] == 2 and found.counts["img"] == 4  # of two steps: an image, and a spectrogram
    assert "Qwen3ForCausalLM" in found.words["layout"] and "pp 1" in found.words["layout"]
    assert "pack_tokens: 64" in found.words["recipe"] and "2.13.0" in found.words["environment"]


def test_a_traced_step_has_hidden_and_exposed_communication_by_rank(tmp_path: Path) -> None:
    found = page(whole_run(tmp_path / "run"))
    of_rank = [135, 40, 80, 10, 4, 5, 10, 10, 6, 4]  # step, forward, backward, all-to-all, wait, optimizer, data, ...
    assert found.numbers["step"] == pytest.approx(2 * of_rank)


def test_several_runs_are_on_one_page_and_have_labels_of_their_own(tmp_path: Path) -> None:
    runs = [save_run(tmp_path / name / "run", [line(1), line(2)], f"output_dir: {name}\n") for name in ("a", "b")]
    found = page(*runs, whole_run(tmp_path / "c"))
    for label in ("a/run", "b/run", "c"):
        assert label in found.words["overview"] and label in found.words["loss"]
    assert "output_dir" in found.words["recipe"].split("recipe.yaml")[0]  # among the keys that differ
    assert "pack_tokens" not in found.words["recipe"].split("recipe.yaml")[0]


def test_names_and_texts_are_shown_as_they_are(tmp_path: Path) -> None:
    evil = r'<script src=x>alert("x")&amp;\1'
    sources = {evil: {"text": {"loss": 1.0, "tokens": 1}}}
    run = save_run(tmp_path / "<b>run", [line(1, sources=sources, **{evil: 3.5})], f"note: '{evil}'\n")
    save_samples(run / "samples", 1, evil)
    found = page(run)
    assert found.counts["script"] == 1 and "b" not in found.counts
    for chapter in ("loss", "samples", "others", "recipe"):
        assert evil in found.words[chapter]


def test_one_line_of_metrics_is_enough_and_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", [line(4)])
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 5, "lo')
    found = page(run)
    assert found.numbers["overview"][:3] == [4, 9, 12.5 / 4]
    assert "No step was traced" in found.words["step"] and "no layout.json" in found.words["layout"]


def test_media_beyond_the_room_of_a_page_are_counted_and_left_out(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", [line(1)])
    noise = np.random.default_rng(0).bytes(1_500_000)
    header = b"RIFF" + (36 + len(noise)).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
    header += bytes.fromhex("01000100803e0000007d000002001000") + b"data" + len(noise).to_bytes(4, "little")
    save_samples(run / "samples", 1, "loud", {f"{n}.wav": header + noise for n in range(4)})
    found = page(run)
    assert "2 of 4 images and sounds are left out" in found.words["samples"] and found.counts["audio"] == 2


def test_a_tone_is_a_line_of_its_spectrogram() -> None:
    pixels = np.asarray(spectrogram(np.sin(2 * np.pi * 2000 * np.arange(8000) / 16000)))
    assert pixels.shape == (64, 160)
    assert set(pixels.mean(axis=1).argsort()[-2:].tolist()) <= {46, 47, 48}  # 2 of 8 kHz: 16 of 64 from the bottom


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: [path], r"is not the folder of a run \(no recipe.yaml\)"),
        (lambda path: [save_run(path / "new", [])], "has no metrics yet"),
        (lambda path: 2 * [save_run(path / "run", [line(1)])], "is named twice"),
    ],
)
def test_a_folder_that_cannot_be_shown_is_refused_in_words(
    tmp_path: Path, make: Callable[[Path], list[Path]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        write_report(make(tmp_path), tmp_path / "report.html")


def test_a_file_that_is_no_report_is_not_overwritten(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", [line(1)])
    done = CliRunner().invoke(app, ["report", str(run), "--output", str(run / "recipe.yaml")])
    assert done.exit_code == 2 and "exists and is no report" in done.output
    for _ in range(2):
        assert CliRunner().invoke(app, ["report", str(run)]).output.strip() == str(run / "report.html")


def test_a_run_ends_with_its_report_and_never_for_want_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.load(str(tiny_recipe(tmp_path, evaluated=True, text_only=True, report=True)))
    Trainer(recipe).fit()
    found = Page(tmp_path / "run" / "report.html")
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert found.numbers["loss"][:2] == [lines[0]["loss"], lines[-1]["loss"]]
    assert "Qwen3ForCausalLM" in found.words["layout"] and "torch" in found.words["environment"]

    def broken(*_: Any) -> None:
        raise RuntimeError("no ink [left]")

    monkeypatch.setattr(write_module, "read_runs", broken)
    with console.capture() as printed:
        assert Trainer(recipe).fit().step == 4
    assert "no report was written: no ink [left]; `omnitrain report" in printed.get()
