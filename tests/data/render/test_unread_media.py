"""Media that nobody would learn of are an error before training: forgotten columns, markers, and idle components."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnitrain.data.render.native import NativeInputs
from omnitrain.data.render.unread import require_shown
from omnitrain.data.sources.rows import open_sources
from omnitrain.errors import UserError
from omnitrain.recipe import Columns, DataSource, Recipe
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.check import check_recipe
from tests.tiny import png, tiny_recipe, tiny_row, write_parquet

LLAVA = {"id": "a", "image": "cat.jpg", "conversations": [{"from": "human", "value": "<image>\nwhat?"}]}
SEES = {"readers": {"image": {"image_encoder": None}, "video": {"image_encoder": None}}}
DRAWS = {"writers": {"image": {"image_decoder": None}}}
READS_NATIVELY = {"native": {"image", "video"}}
OWN = {"columns": {"messages": "conversations"}}


def source(folder: Path, record: dict[str, Any], name: str = "rows", **settings: Any) -> DataSource:
    file = folder / f"{name}.jsonl"
    file.write_text(json.dumps(record) + "\n")
    return DataSource(path=str(file), **settings)


def problems(
    train: list[DataSource],
    heldout: list[DataSource] = [],  # noqa: B006 - read only
    *,
    readers: Any = (),
    writers: Any = (),
    native: Collection[str] = (),
    spared: Collection[str] = (),
) -> list[str]:
    renderer = SimpleNamespace(native=NativeInputs(dict.fromkeys(native, 0)))
    processor = SimpleNamespace(readers=dict(readers), writers=dict(writers), renderer=renderer)
    try:
        require_shown(open_sources(train), open_sources(heldout), processor, spared)
    except UserError as error:
        return str(error).splitlines()
    return []


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "7"}]}


def test_a_forgotten_column_and_a_forgotten_marker_are_named(tmp_path: Path) -> None:
    column, unfed = problems([source(tmp_path, LLAVA, **OWN)], **SEES)
    assert "column 'image' has image files that no message shows: set `columns.images: image`" in column
    assert unfed.startswith("model.encoders.image_encoder: no message of a user in data.train shows image or video")
    columns = {"messages": "conversations", "images": "image"}
    marker, _ = problems([source(tmp_path, LLAVA, columns=columns)], **SEES)
    assert "column 'image' (columns.images) has files that no message shows" in marker
    assert "with `media_markers: [image]`" in marker
    assert problems([source(tmp_path, LLAVA, columns=columns, media_markers=["image"])], **SEES) == []


def test_whole_models_that_read_media_take_text_but_no_unread_media(tmp_path: Path) -> None:
    assert problems([source(tmp_path, said("1 + 1"))], **READS_NATIVELY) == []
    (column,) = problems([source(tmp_path, LLAVA, **OWN)], **READS_NATIVELY)
    assert "set `columns.images: image`" in column


def test_files_of_a_shard_that_no_column_names_are_known_by_their_suffix(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "rows.tar", "w") as tar:
        for suffix, content in (("jpg", png(0)), ("txt", b"a cat")):
            member = tarfile.TarInfo(f"1.{suffix}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    shard = DataSource.model_validate({"path": str(tmp_path / "rows.tar"), "columns": {"response": "txt"}})
    (column,) = problems([shard], **READS_NATIVELY)
    assert "column 'jpg' has image files that no message shows: set `columns.images: jpg`" in column
    shown = shard.model_copy(update={"columns": Columns(response="txt", images="jpg")})
    assert problems([shown], **READS_NATIVELY) == []


def test_a_marker_in_a_text_is_text_only_where_the_recipe_says_so(tmp_path: Path) -> None:
    html = said("what does <video> do in HTML?")
    (problem,) = problems([source(tmp_path, html)], **READS_NATIVELY)
    assert "texts contain <video>" in problem and "or `media_markers: []` if it is text" in problem
    assert problems([source(tmp_path, html, media_markers=[])], **READS_NATIVELY) == []
    assert problems([source(tmp_path, html)]) == []  # of a language model


def test_media_that_messages_show_and_no_column_holds_are_named(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "image"}]}], "my_images": ["a.png"]}
    (problem,) = problems([source(tmp_path, row)], **SEES)
    assert "messages show image, but column 'images' (columns.images) has no file" in problem
    assert "set `columns.images: my_images`" in problem


def test_every_component_is_fed_by_training_data_or_spared(tmp_path: Path) -> None:
    shown = {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": ["a.png"]}
    text, image = source(tmp_path, said("2")), source(tmp_path, shown, "images")
    assert problems([text, image], **SEES) == []
    assert [problem.split(":")[0] for problem in problems([text], [image], **SEES)] == ["model.encoders.image_encoder"]
    assert problems([text], **SEES, spared=["image_encoder"]) == []
    (decoder,) = problems([image], **SEES, **DRAWS)
    assert decoder.startswith("model.decoders.image_decoder: no message of an assistant in data.train shows image")


def test_check_and_run_refuse_to_train_blind(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path)
    hidden = tiny_row("text", 0)
    hidden.media["image"].append(png(0))
    blind = write_parquet(tmp_path / "blind.parquet", [hidden])
    recipe = Recipe.load(str(path), [f"data.train=[{{path: {blind}}}]", "model.decoders={}"])
    found = [problem for problem in check_recipe(recipe) if "no message" in problem]
    keys = ["data", "model.encoders.image_encoder", "model.encoders.audio_encoder"]
    assert sorted(problem.partition(":")[0] for problem in found) == sorted(keys)
    with pytest.raises(UserError, match="has files that no message shows"):
        Trainer(recipe)
