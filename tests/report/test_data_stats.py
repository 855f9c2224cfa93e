"""Statistics of data: they are those of the samples and packs of a run."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.data.packing.sample import Rejected
from omnitrain.recipe import Recipe
from omnitrain.report.data.stats import DataStats
from omnitrain.train.epochs import loader_of
from omnitrain.train.verbs.preview import data_stats, model_without_weights
from tests.report.parsed import self_contained
from tests.report.test_preview import top_rules
from tests.tiny import TASKS, png, tiny_recipe, tiny_row, webp, write_parquet

STEPS = ["train.steps=6", "data.pack_tokens=60"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over rows of all tasks, two of them damaged, and over a second data set of text."""
    folder = tmp_path_factory.mktemp("data")
    tiny_recipe(folder)
    rows = [tiny_row(TASKS[i % len(TASKS)], i) for i in range(21)]
    for row in (rows[1], rows[8]):
        row.media["image"][0] = png(0)[: 30 + len(row.id)]
    write_parquet(folder / "train.parquet", rows)
    write_parquet(folder / "more.parquet", [tiny_row("text", 100 + i) for i in range(5)])
    return folder


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Recipe:
    two = f"data.train=[{{path: {folder}/train.parquet, weight: 3}}, {{path: {folder}/more.parquet}}]"
    return Recipe.load(str(folder / "recipe.yaml"), [two, *STEPS])


@pytest.fixture(scope="module")
def stats(recipe: Recipe) -> DataStats:
    return data_stats(recipe)


def test_lengths_shares_and_losses_are_those_of_the_samples(recipe: Recipe, stats: DataStats) -> None:
    model, processor = model_without_weights(recipe)
    loader = loader_of(recipe, model, processor, recipe.train.packs_per_step)
    samples = [loader.rows[0, s, row] for s, table in enumerate(loader.sources) for row in range(len(table))]
    assert [source.name for source in stats.sources] == sorted(TASKS)
    for source in stats.sources:
        own = [one for one in samples if one.source == source.name and not isinstance(one, Rejected)]
        lengths = [len(sample) for sample in own]
        assert (source.samples, source.length["min"], source.length["max"]) == (len(own), min(lengths), max(lengths))
        assert source.length["mean"] == pytest.approx(sum(lengths) / len(own))
        media = sum(span.item.num_tokens for sample in own for span in sample.spans)
        of_media = [share for kind, share in source.tokens.items() if not kind.startswith("text")]
        assert sum(of_media) == pytest.approx(media / sum(lengths))
        assert sum(source.tokens.values()) == pytest.approx(1)
        trained = sum(int(sample.loss_mask.sum()) for sample in own)
        trained += sum(span.item.num_tokens for sample in own for span in sample.spans if span.is_target)
        assert source.predicted == pytest.approx(trained / sum(lengths))
    tokens = {source.name: set(source.tokens) for source in stats.sources}
    assert tokens["image_to_speech"] == {"text", "text predicted", "image", "audio predicted"}
    assert tokens["video_to_text"] == {"text", "text predicted", "video"}


def test_fill_and_epochs_are_those_of_the_run(recipe: Recipe, stats: DataStats) -> None:
    loader = loader_of(recipe, *model_without_weights(recipe), recipe.train.packs_per_step)
    packs = [pack for step in islice(loader, 6) for pack in step]
    state = loader.state().slots[0]
    read = Counter(loader.order.draw(index)[1] for index in range(state.next_index))
    assert stats.packing is not None and stats.packing.packs == 6
    assert stats.packing.fill == pytest.approx(sum(pack.num_tokens for pack in packs) / (6 * 60))
    assert stats.packing.samples == pytest.approx(sum(len(pack.info.ids) for pack in packs) / 6)
    assert stats.packing.predicted == pytest.approx(sum(sum(pack.loss_counts().values()) for pack in packs) / 6)
    first, second = stats.data_sets
    assert (first.share, second.share) == (0.75, 0.25)
    waiting = len(state.held)
    for index, data_set in enumerate((first, second)):
        assert data_set.epochs == pytest.approx(read[index] / data_set.rows, abs=(waiting + 1) / data_set.rows)
    assert first.epochs * first.rows + second.epochs * second.rows == pytest.approx(state.next_index - waiting)


def test_rows_of_several_samples_and_weights_of_tokens_are_read_as_in_a_run(folder: Path) -> None:
    for name, letters in (("long", 130), ("short", 20)):
        lines = [json.dumps({"text": "x" * letters}) + "\n" for _ in range(30)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    two = ", ".join(f"{{path: {folder}/{name}.jsonl, columns: {{text: text}}}}" for name in ("long", "short"))
    recipe = Recipe.load(
        str(folder / "recipe.yaml"),
        [f"data.train=[{two}]", "data.weights_by=tokens", "data.stages=[{from_step: 3, weights: {short: 3}}]", *STEPS],
    )
    stats = data_stats(recipe)
    loader = loader_of(recipe, *model_without_weights(recipe), recipe.train.packs_per_step)
    packs = [pack for step in islice(loader, 6) for pack in step]
    state = loader.state().slots[0]
    read = state.next_index - len(state.held)
    assert [(one.rows, one.measured) for one in stats.data_sets] == [(30, 30), (30, 30)]
    assert [one.samples for one in stats.sources] == [30 * 3, 30]
    assert stats.packing.fill == pytest.approx(sum(pack.num_tokens for pack in packs) / (6 * 60))
    assert sum(one.epochs * one.rows for one in stats.data_sets) == pytest.approx(read)
    (long, short), lengths = stats.data_sets, loader.state().tokens_per_draw
    ratio = lengths[0] / lengths[1]  # rows of the short ones for each long one, at equal weights
    assert short.share == pytest.approx((ratio / (1 + ratio) + 3 * ratio / (1 + 3 * ratio)) / 2)
    assert long.share + short.share == pytest.approx(1)


def test_a_data_set_that_ends_leaves_its_share_to_the_others(folder: Path) -> None:
    two = f"data.train=[{{path: {folder}/train.parquet}}, {{path: {folder}/more.parquet, epochs: 2}}]"
    recipe = Recipe.load(str(folder / "recipe.yaml"), [two, "train.steps=20", "data.pack_tokens=60"])
    first, second = data_stats(recipe).data_sets
    loader = loader_of(recipe, *model_without_weights(recipe), recipe.train.packs_per_step)
    state = [loader.state() for _ in islice(loader, 20)][-1].slots[0]
    read = Counter(loader.order.draw(index)[1] for index in range(state.next_index) if index not in state.held)
    assert second.epochs == 2 and read[1] == 2 * second.rows
    assert first.epochs * first.rows == pytest.approx(read[0], rel=0.1)
    assert first.share == pytest.approx(read[0] / read.total(), rel=0.02) and first.share + second.share == 1


def test_rejected_rows_are_counted_by_reason(stats: DataStats) -> None:
    (one,) = stats.rejected
    assert (one.source, one.rows, one.example) == ("image_to_text", 2, "image_to_text/1")
    assert "unreadable image of ... bytes" in one.reason and "unreadable image of 45 bytes" in one.words
    assert [(data_set.measured, data_set.rejected) for data_set in stats.data_sets] == [(21, 2), (5, 0)]
    assert {source.name: source.rejected for source in stats.sources}["image_to_text"] == 2


def test_videos_that_a_limit_reads_at_a_lower_rate_are_counted(folder: Path, tmp_path: Path) -> None:
    rows = [tiny_row("video_to_text", index) for index in range(3)]
    rows[2].media["video"] = [webp(2, frames=9)]
    write_parquet(tmp_path / "films.parquet", rows)
    films = [f"data.train=[{{path: {tmp_path}/films.parquet}}]", "data.pack_tokens=160"]
    limited = data_stats(str(folder / "recipe.yaml"), [*films, "model.encoders.image_encoder.max_frames=4"])
    assert [one.lowered for one in limited.sources] == [1]
    said = "videos that `max_frames` reads at a lower rate: 1 of video_to_text"
    assert said in " ".join(str(limited).split())


def test_every_sample_and_every_pack_is_in_a_histogram(stats: DataStats) -> None:
    for histogram, count in ((stats.lengths, 24), (stats.fills, 6)):
        assert sum(map(sum, histogram.counts.values())) == count
        assert histogram.edges == sorted(set(histogram.edges)) and len(histogram.edges) <= 21
    assert stats.fills.edges[-1] == 61


def test_a_page_a_notebook_a_terminal_and_a_file_have_the_same_numbers(stats: DataStats, tmp_path: Path) -> None:
    found = self_contained(stats.save(tmp_path / "stats.html"))
    assert list(found.words) == ["overview", "lengths", "modalities", "packs", "rejected"]
    assert stats.data_sets[0].epochs in found.numbers["overview"] and stats.packing.fill in found.numbers["packs"]
    assert "unreadable image of ... bytes" in found.words["rejected"] and found.counts["svg"] == 3
    assert all(rule.startswith((".omnitrain", "@media", "div.omnitrain")) for rule in top_rules(stats._repr_html_()))
    written = json.loads(stats.save_json(tmp_path / "stats.json").read_text())
    assert written["packing"]["fill"] == stats.packing.fill and written["sources"][0]["name"] == "image_to_speech"
    text = " ".join(str(stats).split())
    assert f"expected fill {stats.packing.fill:.1%}" in text and "tokens of packs, at most 60" in text
    assert not any("lower rate" in shown for shown in (text, *found.words.values()))


def test_some_rows_of_a_large_data_set_stand_for_all_of_them(folder: Path) -> None:
    done = CliRunner().invoke(app, ["show", str(folder / "recipe.yaml"), *STEPS, "--stats", "--rows", "10"])
    assert done.exit_code == 0 and "epochs in 6 steps" in done.output
    few = data_stats(str(folder / "recipe.yaml"), STEPS, rows=10)
    assert [(one.rows, one.measured) for one in few.data_sets] == [(21, 10)]
    assert few.sources == data_stats(str(folder / "recipe.yaml"), STEPS, rows=10).sources


def test_data_of_which_every_row_is_rejected_is_described(folder: Path, tmp_path: Path) -> None:
    stats = data_stats(str(folder / "recipe.yaml"), ["data.pack_tokens=3"])
    assert stats.packing is None and [one.epochs for one in stats.data_sets] == [None]
    assert sum(one.rows for one in stats.rejected) == 21
    assert "No pack can be filled" in self_contained(stats.save(tmp_path / "stats.html")).words["packs"]
    assert "no pack can be filled" in str(stats)


def test_a_recipe_that_counts_epochs_and_samples_is_measured_in_its_steps(folder: Path) -> None:
    counted = ["train.steps=1000", "train.epochs=3", "train.samples_per_step=6", "data.pack_tokens=60"]
    stats = data_stats(str(folder / "recipe.yaml"), counted)
    assert stats.steps > 1 and stats.packs_per_step > 1
    assert stats.data_sets[0].epochs == pytest.approx(3, rel=0.3)  # of whole steps with few rows
    assert stats.packing.samples_per_step == pytest.approx(6, rel=0.3)
