"""Data as LLaVA and others write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from omnitrain.data.sources.rows import Row, RowSource, open_sources
from omnitrain.data.sources.turns import MARKERS, as_messages
from omnitrain.errors import DataError, UserError
from omnitrain.recipe import Columns, DataSource
from tests.tiny import png, tiny_model, tiny_processor


def turns(question: str, **columns: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "7"}], **columns}


ROWS = [turns("hello"), turns("a text with <video> in it"), turns("<image>\nwhich digit?", image="digits/7.png")]


def opened(path: Path, **settings: Any) -> RowSource:
    columns = Columns(messages="conversations", images="image")
    return open_sources([DataSource(path=str(path), columns=columns, media_markers=["image"], **settings)])[0]


def as_lines(folder: Path) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder / "rows.jsonl"


def as_parquet(folder: Path) -> Path:
    Dataset.from_list([{"image": None} | row for row in ROWS]).to_parquet(str(folder / "rows.parquet"))
    return folder / "rows.parquet"


@pytest.mark.parametrize("write", [as_lines, as_parquet])
def test_turns_are_messages_and_their_markers_are_media_in_a_folder(tmp_path: Path, write: Any) -> None:
    (tmp_path / "media" / "digits").mkdir(parents=True)
    (tmp_path / "media" / "digits" / "7.png").write_bytes(png(7))
    rows = opened(write(tmp_path), media_folder=str(tmp_path / "media"))
    assert [message["role"] for message in rows[0].messages] == ["user", "assistant"]
    assert [row.messages[0]["content"] for row in rows] == [
        "hello",
        "a text with <video> in it",
        [{"type": "image"}, {"type": "text", "text": "\nwhich digit?"}],
    ]
    assert rows.first_of_each_kind() == [0, 2]
    assert rows[2].media_bytes("image", 0) == png(7)
    sample = tiny_processor(tiny_model()).sample(rows[2])
    assert [span.component for span in sample.spans] == ["image_encoder"]


def test_text_around_and_between_markers_stays_as_it_is() -> None:
    marked = [{"role": "user", "content": " <video> then <image><audio>!"}, {"role": "assistant", "content": "<image>"}]
    first, second = as_messages(marked, marked=MARKERS)
    parts = [part.get("text", part["type"]) for part in first["content"]]
    assert parts == [" ", "video", " then ", "image", "audio", "!"]
    assert second == {"role": "assistant", "content": [{"type": "image"}]}
    assert as_messages(marked, marked=()) == marked
    assert as_messages(marked, marked=["audio"])[0]["content"][0]["text"] == " <video> then <image>"


def test_what_is_no_turn_is_left_to_those_who_say_so() -> None:
    odd = ["hello", {"role": "user"}, {"content": "a"}, None]
    assert as_messages(odd, marked=MARKERS) == odd
    assert as_messages("hello", marked=MARKERS) == "hello"


def test_a_folder_of_media_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl': media_folder 'nowhere' is not a folder"):
        opened(as_lines(tmp_path), media_folder="nowhere")


def test_parquet_with_turns_of_both_kinds_is_read(tmp_path: Path) -> None:
    """Its turns have the fields of both, and null where the other kind has values."""
    other = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "7"}]
    Dataset.from_list([turns("hello"), {"conversations": other}]).to_parquet(str(tmp_path / "rows.parquet"))
    columns = Columns(messages="conversations")
    (rows,) = open_sources([DataSource(path=str(tmp_path / "rows.parquet"), columns=columns)])
    said = [[(message["role"], message["content"]) for message in row.messages] for row in rows]
    assert said == [[("user", "hello"), ("assistant", "7")]] * 2
    assert rows.first_of_each_kind() == [0, 1]


def test_prompts_with_markers_a_system_text_and_media_are_messages(tmp_path: Path) -> None:
    rows = [
        {"rules": "be short", "question": "<image> and <image>?", "answer": "no", "photos": ["a.png", "b.png"]},
        {"rules": "be short", "question": "and this?", "answer": "yes", "photos": ["c.png"]},
        {"rules": "be short", "question": "hello", "answer": "hi", "photos": []},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = Columns(prompt="question", response="answer", system="rules", images="photos")
    node = DataSource(path=str(tmp_path / "rows.jsonl"), columns=columns, media_markers=["image"])
    (found,) = open_sources([node])
    image = {"type": "image"}
    asked = [
        [image, {"type": "text", "text": " and "}, image, {"type": "text", "text": "?"}],
        [image, {"type": "text", "text": "and this?"}],
        "hello",
    ]
    answers = ["no", "yes", "hi"]
    for row, question, answer in zip(found, asked, answers, strict=True):
        assert row.messages == [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    assert found.shown == {("image", False)} and found[0].media["image"] == ["a.png", "b.png"]


def test_an_empty_path_of_a_row_without_media_is_none(tmp_path: Path) -> None:
    both = (turns("hello", image=""), turns("<image> what?", image="a.png"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in both))
    rows = opened(tmp_path / "rows.jsonl", media_folder=str(tmp_path))
    assert rows[0].media["image"] == [""]
    assert len(tiny_processor(tiny_model()).sample(rows[0]).spans) == 0


@pytest.mark.parametrize(("value", "found"), [(None, "content None"), (3, "content 3"), (["a"], "part 'a'")])
def test_a_turn_without_a_text_is_named_in_its_rejection(value: Any, found: str) -> None:
    row = Row("odd", "rows", as_messages(turns(value)["conversations"], marked=MARKERS), {}, {})
    assert f"(TypeError: {found})" in tiny_processor(tiny_model()).sample(row).reason


def test_what_llava_data_lack_in_a_recipe_is_told(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text(json.dumps(turns("<image> what?", image="a.png")) + "\n")
    with pytest.raises(DataError, match=r"set `columns\.messages: conversations`"):
        open_sources([DataSource(path=str(lines))])
    with pytest.raises(ValueError, match=r"'a.png' in .*; set `media_folder` of the data source"):
        opened(lines)[0].media_bytes("image", 0)
    with pytest.raises(DataError, match=r"expected a list of rows; a file with one row per line ends in \.jsonl"):
        open_sources([DataSource(path=str(lines.rename(tmp_path / "rows.json")))])
    with pytest.raises(UserError, match=r"sources: found 'rows\.jsonl'; expected a list of DataSource"):
        open_sources("rows.jsonl")  # type: ignore[arg-type]
