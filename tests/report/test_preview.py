"""Packs as people look at them: what is shown equals what the model gets."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.data.chat.parts import media_parts
from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.recipe import Recipe
from omnitrain.report.data.pack_view import GapView, ItemView, PackView, TokenView, view_pack
from omnitrain.report.data.preview import DataPreview
from omnitrain.train.epochs import loader_of
from omnitrain.train.verbs.preview import model_without_weights, preview
from tests.data.render.test_template_renderer import processor_of
from tests.data.render.test_template_renderer import row as row_of
from tests.report.parsed import self_contained
from tests.tiny import part, png, tiny_model, tiny_processor, tiny_recipe, tiny_row, write_parquet

DAMAGED = "images_to_text/99"


def recipe_with_a_damaged_row(folder: Path) -> Recipe:
    """The second of its images is cut, and so are its bytes in the message."""
    recipe = Recipe.load(str(tiny_recipe(folder)))
    rows = [tiny_row(task, seed) for seed in range(2) for task in ("text_to_image", "video_to_text", "image_to_speech")]
    damaged = tiny_row("images_to_text", 99)
    damaged.media["image"][1] = png(1)[:40]
    write_parquet(folder / "train.parquet", [*rows, damaged])
    return recipe


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> DataPreview:
    return preview(recipe_with_a_damaged_row(tmp_path_factory.mktemp("data")), packs=3)


def view_of(texts: list[tuple[str, str]], capacity: int = 4096) -> tuple[PackView, Pack]:
    processor = tiny_processor(tiny_model())
    rows = [tiny_row("text", seed) for seed in range(len(texts))]
    for row, (asked, said) in zip(rows, texts, strict=True):
        row.messages[0]["content"], row.messages[1]["content"] = [part("text", asked)], [part("text", said)]
    pack = Pack.from_samples([processor.sample(row, index) for index, row in enumerate(rows)])
    return view_pack(pack, [rows[index] for index in pack.info.indices], processor, capacity), pack


def test_the_packs_are_those_of_the_run_with_their_losses_media_and_positions(tmp_path: Path) -> None:
    recipe = Recipe.load(str(tiny_recipe(tmp_path)), ["train.packs_per_step=2"])
    model, processor = model_without_weights(recipe)
    packs = [
        pack for step in islice(loader_of(recipe, model, processor, recipe.train.packs_per_step), 2) for pack in step
    ][:3]
    views = preview(recipe, packs=3).packs
    assert [view.num_tokens for view in views] == [pack.num_tokens for pack in packs]
    for view, pack in zip(views, packs, strict=True):
        assert [sample.row.id for sample in view.samples] == list(pack.info.ids)
        assert view.predicted == pack.loss_counts()
        pieces = [piece for sample in view.samples for piece in sample.pieces]
        tokens = [piece for piece in pieces if isinstance(piece, TokenView)]
        assert sum(len(token.ids) for token in tokens if token.is_predicted) == view.predicted["text"]
        items = [piece for piece in pieces if isinstance(piece, ItemView)]
        for name, batch in pack.targets.items():
            of_decoder = [item for item in items if item.component == name]
            assert all(item.is_predicted and item.part is not None and item.part.is_target for item in of_decoder)
            assert sum(item.num_tokens for item in of_decoder) == view.predicted[name] == len(batch.positions)
        for piece in (*(token for token in tokens if token.is_read), *items):
            assert piece.position == (int(pack.position_ids[0, piece.start]),)


def test_the_text_of_the_tokens_is_the_text_of_the_conversation(shown: DataPreview) -> None:
    for sample in (sample for pack in shown.packs for sample in pack.samples):
        text = "".join(piece.text for piece in sample.pieces if isinstance(piece, TokenView))
        asked = sample.row.messages[0]["content"][-1].get("text") or ""
        assert text.startswith("<|user|>") and asked in text and text.endswith("<|end|>")
        end = [piece for piece in sample.pieces if isinstance(piece, TokenView)][-1]
        assert end.is_predicted and not end.is_read  # the model gets no token after the last one that it predicts from


def test_characters_of_several_tokens_are_whole_and_belong_to_their_mask() -> None:
    view, pack = view_of([("heißt 日本?", "ja 🙂")])
    tokens = [piece for piece in view.samples[0].pieces if isinstance(piece, TokenView)]
    assert "".join(token.text for token in tokens if token.is_predicted) == "ja 🙂<|end|>"
    assert [len(token.ids) for token in tokens if token.text in ("ß", "日", "🙂")] == [2, 3, 4]
    assert sum(len(token.ids) for token in tokens) == pack.num_tokens


def test_of_a_long_sample_both_ends_are_shown_and_the_rest_is_counted() -> None:
    view, pack = view_of([("a" * 3000, "b" * 40)])
    pieces = view.samples[0].pieces
    (gap,) = [piece for piece in pieces if isinstance(piece, GapView)]
    tokens = [piece for piece in pieces if isinstance(piece, TokenView)]
    assert len(tokens) == 1000 and gap.num_tokens + len(tokens) == pack.num_tokens
    assert sum(token.is_predicted for token in tokens) == 41
    assert [token.start for token in tokens] == [*range(700), *range(pack.num_tokens - 300, pack.num_tokens)]


def test_a_pack_of_many_long_samples_shows_tokens_up_to_a_limit_and_all_samples() -> None:
    view, pack = view_of([("a" * 1200, "b")] * 9, capacity=12_000)
    tokens = sum(isinstance(piece, TokenView) for sample in view.samples for piece in sample.pieces)
    gaps = sum(piece.num_tokens for sample in view.samples for piece in sample.pieces if isinstance(piece, GapView))
    assert tokens == 6000 and tokens + gaps == pack.num_tokens and len(view.samples) == 9


def test_tokens_of_an_item_that_others_interrupt_are_shown_where_they_are() -> None:
    processor, row = tiny_processor(tiny_model()), tiny_row("video_to_text", 0)
    pack = Pack.from_samples([processor.sample(row)])
    batch = pack.inputs["image_encoder"]
    batch.positions[len(batch.positions) // 2 :] += 2  # as if two tokens of text were between frames
    pieces = view_pack(pack, [row], processor, 160).samples[0].pieces
    items = [piece for piece in pieces if isinstance(piece, ItemView)]
    assert [item.num_tokens for item in items] == 2 * [len(batch.positions) // 2]
    assert [item.part is not None for item in items] == [True, False]


def test_a_page_has_tokens_media_positions_and_the_damaged_row_with_its_reason(
    shown: DataPreview, tmp_path: Path
) -> None:
    found = self_contained(shown.save(tmp_path / "preview.html"))
    assert list(found.words) == ["pack1", "pack2", "pack3", "rejected"]
    samples = [sample for pack in shown.packs for sample in pack.samples]
    tasks = [sample.row.source for sample in samples]
    sounds = tasks.count("image_to_speech")
    assert found.counts["audio"] == sounds > 0
    assert found.counts["img"] == len(tasks) + sounds + 1  # an image of each, a spectrogram, the row's whole image
    tokens = [piece for sample in samples for piece in sample.pieces if isinstance(piece, TokenView)]
    assert found.counts["b"] == sum(token.is_predicted for token in tokens)
    words = found.words["rejected"]
    assert DAMAGED in words and "image 2: unreadable image of 40 bytes" in words and "user: [image] [image]" in words
    assert f"of {shown.packs[0].capacity} tokens ({shown.packs[0].fill:.1%} full)" in found.words["pack1"]


def test_a_notebook_gets_a_part_of_a_page_and_a_terminal_gets_text(shown: DataPreview) -> None:
    html = shown._repr_html_()
    assert html.startswith("<style>") and html.endswith("</div>") and "<body" not in html and "<script" not in html
    assert all(rule.startswith((".omnitrain", "@media", "div.omnitrain")) for rule in top_rules(html))
    text = str(shown)
    assert text.count("[[") == text.count("]]") > 0 and "image_decoder writes 16 tokens" in text
    assert f"{DAMAGED}: image 2: unreadable image of 40 bytes" in " ".join(text.split())


def top_rules(html: str) -> list[str]:
    """The selectors of a style sheet outside of all braces."""
    depth, rules, rule = 0, [], ""
    for letter in html.removeprefix("<style>").partition("</style>")[0]:
        if letter == "{" and depth == 0:
            rules.append(rule.strip())
        depth += (letter == "{") - (letter == "}")
        rule = "" if letter == "}" else rule + letter
    assert depth == 0
    return rules


def test_the_command_prints_packs_and_writes_a_page(tmp_path: Path) -> None:
    recipe_with_a_damaged_row(tmp_path)
    file = tmp_path / "seen.html"
    words = [
        "show",
        str(tmp_path / "recipe.yaml"),
        "data.pack_tokens=80",
        "--packs",
        "--num-packs",
        "1",
        "--output",
        str(file),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "of 80 tokens" in done.output and "pack 2" not in done.output
    assert "pack1" in self_contained(file).words


def test_a_row_longer_than_a_pack_is_shown_as_rejected_and_a_number_of_packs_is_checked(tmp_path: Path) -> None:
    recipe = Recipe.load(str(tiny_recipe(tmp_path)), ["data.pack_tokens=24"])
    reasons = {row.rejected.reason for row in preview(recipe, packs=1).rejected}
    assert any("tokens, but a pack holds at most 24" in reason for reason in reasons)
    with pytest.raises(UserError, match="packs: found 0"):
        preview(recipe, packs=0)
    with pytest.raises(UserError, match="overrides change a recipe"):
        preview(recipe, ["data.pack_tokens=30"])


@pytest.mark.parametrize(("family", "axes"), [("qwen3_vl", 3), ("qwen2_5_omni", 3), ("gemma3", 1)])
def test_media_that_the_foundation_reads_are_where_its_processor_puts_them(
    family: str, axes: int, tmp_path: Path
) -> None:
    processor = processor_of(family)
    shown = ["i+look\n\n+i+ here\n"] if family == "gemma3" else ["v+look\n\n+i+ here\n"]
    rows = [row_of(*shown, "so 日"), row_of("i+and", "b")]
    samples = [processor.sample(row, index) for index, row in enumerate(rows)]
    with_axes = [
        replace(one, position_ids=np.stack([one.position_ids // (i + 1) for i in range(axes)])) for one in samples
    ]
    pack = Pack.from_samples(with_axes)
    view = view_pack(pack, [rows[index] for index in pack.info.indices], processor, 4096)
    assert view.samples[1].positions[-1] == (0, (pack.info.lengths[1] - 1) // axes)
    assert view.position_ids.shape == (axes, pack.num_tokens)
    for sample in view.samples:
        items = [piece for piece in sample.pieces if isinstance(piece, ItemView)]
        firsts = [item for item in items if item.part is not None]
        assert [item.part for item in firsts] == media_parts(sample.row.messages) and not sample.others
        assert all(item.component == f"foundation.{item.part.modality}" for item in firsts if item.part is not None)
        assert all(len(piece.position) == axes for piece in sample.pieces if isinstance(piece, ItemView | TokenView))
    tokens = sum(piece.num_tokens for sample in view.samples for piece in sample.pieces if isinstance(piece, ItemView))
    assert tokens == sum(len(batch.positions) for batch in pack.inputs.values())
    page = DataPreview("native", (view,), (), processor.frames_of).save(tmp_path / "preview.html")
    assert self_contained(page).counts["img"] == 3


def test_media_without_tokens_of_their_own_are_shown_beside_their_sample(tmp_path: Path) -> None:
    processor, row = tiny_processor(tiny_model()), tiny_row("images_to_text", 0)
    read_by_the_forward = replace(processor.sample(row), spans=())
    view = view_pack(Pack.from_samples([read_by_the_forward]), [row], processor, 160)
    assert view.samples[0].others == tuple(media_parts(row.messages)) and len(view.samples[0].others) == 2
    shown = DataPreview("forward", (view,), (), processor.frames_of)
    assert self_contained(shown.save(tmp_path / "preview.html")).counts["img"] == 2
    assert "own forward places: image of 8 x 8 pixels, image of 8 x 8 pixels" in " ".join(str(shown).split())
