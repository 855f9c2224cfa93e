from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.errors import UserError
from omnitrain.recipe import Recipe
from omnitrain.train.verbs.check import check_without_tokenizer
from omnitrain.train.verbs.schedule import show_schedule
from tests.tiny import FOUNDATION, tiny_model, tiny_recipe

ROOT = Path(__file__).parents[3]
PP = "parallel.components.foundation.pp=2"


def load(folder: Path, *overrides: str) -> Recipe:
    config = {**FOUNDATION, "num_hidden_layers": 5}
    return Recipe.load(tiny_recipe(folder), [f"model.foundation.config={json.dumps(config)}", PP, *overrides])


def test_the_verb_prints_stages_and_times_and_writes_the_simulated_step(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    layers = "model.foundation.config.num_hidden_layers=5"
    command = [
        "show",
        str(tmp_path / "recipe.yaml"),
        "--schedule",
        PP,
        layers,
        "train.packs_per_step=8",
        "--nproc",
        "4",
    ]
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "step.json")])
    assert done.exit_code == 0, done.output
    assert (
        "1f1b on 4 ranks (--nproc 4): 2 pipeline ranks, 2 times (data-parallel), 1 stage on each, 4 micro-b"
        in done.output
    )
    assert "peak of live activations, in micro-batches of a stage: 2 on rank 0, 1 on rank 1" in done.output
    assert "rank  1 |     1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3\n" in done.output and "% if stages took" in done.output
    written = json.loads((tmp_path / "step.json").read_text())
    assert written["bubble_of_equal_stages"] == pytest.approx(1 / 5)  # (p - 1) / (m + p - 1)
    assert [len(rank["events"]) for rank in written["ranks"]] == [8, 8]
    assert f"bubble: {written['bubble']:.1%}" in done.output


def test_the_page_shows_what_the_verb_prints(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    show_schedule(Recipe.load("quickstart", [PP, "train.packs_per_step=4"]), 2)
    printed = capsys.readouterr().out.splitlines()
    (shown,) = re.findall(r"^```text\n(1f1b .*?)^```", (ROOT / "docs" / "pipelines.md").read_text(), re.DOTALL | re.M)
    assert [line for line in shown.splitlines() if line not in printed] == []


def test_the_page_on_the_architecture_has_the_graph_that_the_verb_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (command,) = re.findall(r"^omnitrain (show quickstart --schedule .*?)$", page, re.M)
    (shown,) = re.findall(r"^```text\n(foundation: .*?)^```", page, re.DOTALL | re.M)
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output
    assert f"Graph of a step, with the actions of micro-batch 0\n{shown}" in done.output


def test_the_graph_has_each_component_below_its_reader_and_the_actions_of_its_edge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An encoder of all pipeline ranks has actions there; an encoder divided over sections is a chain."""
    show_schedule(load(tmp_path, "train.packs_per_step=4", "parallel.components.image_encoder.place=world"), 2)
    printed = capsys.readouterr().out
    rows = "rank 0: ENCODE0 EXCHANGE0 ENCODE_B0\n   rank 1: ENCODE0 EXCHANGE0 ENCODE_B0\n"
    printed = printed.replace("│  ", "   ").replace("      ", "   ")
    assert f"─ all-to-all ─ image_encoder: ranks 0 to 1 of main\n   {rows}" in printed
    assert "─ in the forwards ─ audio_encoder: rank 0 of main\n" in printed
    tower = {"vision": {"components": ["image_encoder.tower"], "ranks": 1}}
    overrides = [f"parallel.sections={json.dumps(tower)}", "train.packs_per_step=4"]
    show_schedule(Recipe.load("quickstart", overrides), 2)
    chain = "─ image_encoder.projector: rank 0 of main\n   └─ messages ─ image_encoder.tower: rank 1 of vision\n"
    assert chain in capsys.readouterr().out


def test_stages_hold_every_parameter_and_what_two_of_them_hold_counts_twice(tmp_path: Path) -> None:
    recipe = load(tmp_path, "train.packs_per_step=4", "parallel.components.foundation.schedule.split=[2, 3]")
    first, last = show_schedule(recipe)["stages"]
    assert (first["blocks"], last["blocks"], first["rank"], last["rank"]) == ((0, 2), (2, 5), 0, 1)
    assert "model.embed_tokens" in first["others"] and {"image_encoder", "audio_encoder"} <= {*first["others"]}
    assert "model.norm" in last["others"] and "image_encoder" not in last["others"]
    assert first["share"] + last["share"] == pytest.approx(1) and last["share"] > first["share"]
    model = tiny_model()
    decoders = {*model.decoder_names}
    assert decoders <= {*first["others"]} and decoders <= {*last["others"]}


@pytest.mark.parametrize(
    ("kind", "chunks", "m", "makespan"),
    [("gpipe", None, 3, 3 * 6 + 6), ("1f1b", None, 4, 4 * 6 + 6), ("interleaved", 2, 4, 4 * 6 + 3)],
)
def test_equal_stages_take_as_long_as_the_formula_says(
    tmp_path: Path, kind: str, chunks: int | None, m: int, makespan: int
) -> None:
    """A rank's forward takes 2 s and its backward 4 s, so ``m (F + B) + (p - 1) (F + B) / v``."""
    schedule = f"parallel.components.foundation.schedule={{kind: {kind}, chunks: {chunks or 'null'}}}"
    shown = show_schedule(load(tmp_path, schedule, f"train.packs_per_step={m}"), forward=4.0)
    assert shown["bubble_of_equal_stages"] == pytest.approx(1 - m * 6 / makespan)
    assert sum(e["end"] - e["start"] for rank in shown["ranks"] for e in rank["events"]) == pytest.approx(m * 12)


@pytest.mark.second
def test_the_default_schedule_runs_with_too_few_micro_batches_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_without_tokenizer(load(tmp_path), 2) == []
    told = capsys.readouterr().out
    assert "advice: 1f1b on 2 pipeline ranks needs 2 micro-batches per rank and step, but train.packs_per" in told
    with pytest.raises(
        UserError, match=r"1f1b on 2 pipeline ranks needs 2 .* gives 1; set train.packs_per_step to 2 or"
    ):
        show_schedule(load(tmp_path, "parallel.components.foundation.schedule.kind=1f1b"))
    show_schedule(load(tmp_path, "parallel.components.foundation.schedule.kind=gpipe"))


def test_a_section_has_a_row_of_its_own_and_the_times_that_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"vision": {"components": ["image_encoder"], "ranks": 1, "encode_twice": True}}
    overrides = [f"parallel.sections={json.dumps(section)}", "train.packs_per_step=4"]
    recipe = Recipe.load(tiny_recipe(tmp_path), overrides)
    shown = show_schedule(recipe, 2, forward=1.0, encode=0.5)
    assert shown["kind"] == "accumulate" and [rank["name"] for rank in shown["ranks"]] == ["rank  0", "vision"]
    # The first encoding, four forwards and backwards, and the last backward of the encoder, with its forward again.
    assert shown["makespan"] == pytest.approx(0.5 + 4 * 3 + 1.5)
    printed = capsys.readouterr().out
    assert "gradient accumulation on 2 ranks (--nproc 2): 1 rank without a pipeline, 4 micro-batches per" in printed
    assert "section vision, rank 1: image_encoder, 1 micro-batch at a time, 2 slots, no activations" in printed
    assert re.search(r"\nrank  0 \| +0F0 .*\nvision  \| ENCODE0 +ENCODE1 .*ENCODE_B0", printed)


def test_the_stages_of_a_pipeline_have_nothing_of_a_section(tmp_path: Path) -> None:
    section = {"vision": {"components": ["image_encoder"], "ranks": 1}}
    shown = show_schedule(load(tmp_path, f"parallel.sections={json.dumps(section)}", "train.packs_per_step=4"), 3)
    first, last = shown["stages"]
    assert "audio_encoder" in first["others"] and "image_encoder" not in {*first["others"], *last["others"]}
    assert [rank["name"] for rank in shown["ranks"]] == ["rank  0", "rank  1", "vision"]
    placed = {row["component"]: (row["section"], row["ranks"], row["by"]) for row in shown["placements"]}
    assert placed["foundation"] == ("main", "0 to 1", "")
    assert placed["audio_encoder"] == ("main", "0", "in the forwards")
    assert placed["image_encoder"] == ("vision", "2", "messages")


def test_seconds_of_encoders_without_sections_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--encode: this recipe has no sections"):
        show_schedule(load(tmp_path, "train.packs_per_step=4"), encode=1.0)
