"""Rows of eight formats by name: what is trained is what the format's own package trains."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.template_renderer import TemplateRenderer
from omnitrain.data.render.unread import unread_notes
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.errors import DataError
from omnitrain.recipe import DataSource, Recipe
from tests.data.sources.goldens.chatml import HERE, TEMPLATE, summary, tokenizer
from tests.data.sources.goldens.rows import DOCUMENTED, ROWS
from tests.tiny import png, webp
from tests.tiny_processors import qwen2_vl

NESTED = {"history", "masks", "tools", "completion"}
RECIPE = Recipe.model_validate(
    {
        "model": {"foundation": "ORG/NAME"},
        "data": {"train": [{"path": "a.json"}]},
        "output_dir": "run",
        "train": {"steps": 1},
    }
)
CHAT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
ALPACA = {"instruction": "2+2?", "input": "", "output": "4"}


@cache
def goldens() -> dict[tuple[str, str], dict[str, Any]]:
    """(format, row) -> what the package trains, of all files of goldens."""
    made = [json.loads(file.read_text()) for file in sorted(HERE.glob("*.json"))]
    return {(f, n): golden for file in made for f, rows in file.items() if f != "made by" for n, golden in rows.items()}


@cache
def processor() -> OmniProcessor:
    """Reads images and videos, and has the template of the goldens, without its marks of what is generated."""
    made, native = qwen2_vl()
    made.tokenizer = tokenizer()
    made.chat_template = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return OmniProcessor(TemplateRenderer(made, native), {}, {})


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    for digit, name in enumerate(("cat.png", "dog.png")):
        (folder / name).write_bytes(png(digit))
    (folder / "cat.webp").write_bytes(webp(3))
    return folder


def opened(folder: Path, rows: list[dict[str, Any]], suffix: str = "jsonl", **node: Any) -> RowSource:
    path = folder / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_sources([DataSource.model_validate({"path": str(path), **node})])[0]


def trained(folder: Path, media: Path, format: str, name: str, suffix: str) -> dict[str, Any]:
    row = ROWS[format][name]
    node = {"media_folder": str(media)} if ".png" in str(row) or ".webp" in str(row) else {}
    found = processor().sample(opened(folder, [row], suffix, format=format, **node)[0])
    assert isinstance(found, Sample), (name, found)
    return summary(found.input_ids.tolist(), found.loss_mask.tolist(), processor().renderer.tokenizer)


def with_unknown(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a key of its own on the row, each of its turns, and each part of these."""
    turns = {key: [_unknown_turn(turn) for turn in row[key]] for key in ("messages", "conversations") if key in row}
    return row | turns | {"of_row": 1}


def _unknown_turn(turn: dict[str, Any]) -> dict[str, Any]:
    text = "content" if "content" in turn else "value"
    return turn | {text: [{"type": "text", "text": turn[text], "of_part": 1}], "of_message": 1}


@pytest.mark.parametrize("format", ROWS)
def test_rows_train_what_the_package_of_their_format_trains(tmp_path: Path, media: Path, format: str) -> None:
    rows = ROWS[format]
    expected = {name: goldens()[format, DOCUMENTED.get((format, name), name)] for name in rows}
    assert {name: trained(tmp_path, media, format, name, "jsonl") for name in rows} == expected
    nested = rows.keys() & NESTED  # lists of lists, and flags and calls that some messages do not have
    found = {name: trained(tmp_path, media, format, name, "parquet") for name in nested}
    assert found == {name: expected[name] for name in nested}


def test_a_key_that_nothing_reads_is_named_on_every_level_of_every_format(tmp_path: Path) -> None:
    for format, rows in ROWS.items():
        row = with_unknown(rows["system"])
        (note,) = unread_notes([opened(tmp_path, [row], format=format)], processor().renderer, RECIPE)
        has_turns = bool({"messages", "conversations"} & row.keys())
        said = ["column 'of_row'", *["`of_message` of a message", "`of_part` of a part"] * has_turns]
        assert [one for one in said if one not in note] == [], (format, note)


@pytest.mark.parametrize(
    ("row", "format", "why"),
    [
        (CHAT, "sharegpt", "`conversations`"),
        (CHAT | {"image": "cat.png"}, "llava", "`conversations` and `image`"),
        (CHAT | {"video": "cat.webp"}, "llava", "`conversations` and `video`"),
        (ALPACA, "alpaca", "`instruction` and `output`"),
        (ROWS["trl"]["completion"], "trl", "`completion` and `prompt`"),
        (ROWS["ms_swift"]["history"], "ms_swift", "`query` and `response`"),
    ],
)
def test_a_format_is_recognised_by_its_columns_and_said(
    tmp_path: Path, row: dict[str, Any], format: str, why: str
) -> None:
    source, named = opened(tmp_path, [row]), opened(tmp_path, [row], format=format)
    assert source[0] == named[0] and not named.schema.said
    notes = unread_notes([source, named], processor().renderer, RECIPE)
    assert notes[0] == f"data 'rows': read as `format: {format}`, because its rows have {why}"


def test_of_two_formats_that_fit_the_chosen_one_and_the_other_are_said(tmp_path: Path) -> None:
    source = opened(tmp_path, [CHAT | ALPACA])
    assert source[0].messages[0]["content"] == "hi"
    assert source.schema.said == (
        "read as `format: sharegpt`, because its rows have `conversations`; `alpaca` would fit, too, so set `format` "
        "if that is meant"
    )
    assert opened(tmp_path, [CHAT | ALPACA], format="alpaca")[0].messages[0]["content"] == "2+2?"


def test_messages_or_columns_of_the_recipe_come_before_what_could_be_recognised(tmp_path: Path) -> None:
    said = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    plain = opened(tmp_path, [CHAT | said])
    assert not plain.schema.said and plain[0].messages == said["messages"]
    own = opened(tmp_path, [ALPACA | {"answer": "5"}], columns={"prompt": "instruction", "response": "answer"})
    assert not own.schema.said and own[0].messages[-1]["content"] == "5"


@pytest.mark.parametrize(
    ("rows", "node", "problem"),
    [
        ([CHAT], {"format": "alpaca"}, "'alpaca' reads 'instruction' and 'output'; found the columns "
         "['conversations']; such rows are of `format: sharegpt`"),
        ([ALPACA], {"format": "trl"}, "'trl' reads 'messages' or 'prompt' and 'completion'; found"),
        ([{"question": "a", "answer": "b"}], {"format": "alpaca"}, "; `columns` may rename them"),
        ([ALPACA], {"format": "alpaca", "columns": {"messages": "input"}}, "columns.messages: found 'input', but "
         "`format: alpaca` reads 'instruction' and 'output' and does not use `columns.messages`"),
        ([CHAT], {"format": "sharegpt", "columns": {"prompt": "a"}}, "columns.prompt: found 'a', but `format: share"),
        ([ALPACA], {"format": "alpaca", "columns": {"history": "past"}}, "column 'past' (columns.history) is missing"),
        ([ALPACA], {"columns": {"prompt": ["instruction", "inputs"], "response": "output"}}, "column 'inputs' "
         "(columns.prompt) is missing, found ['instruction', 'input', 'output']"),
    ],
)  # fmt: skip
def test_a_format_that_does_not_fit_is_refused_in_words(
    tmp_path: Path, rows: list[dict[str, Any]], node: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError) as raised:
        opened(tmp_path, rows, **node)
    assert problem in str(raised.value) and str(raised.value).startswith(f"data: '{tmp_path / 'rows.jsonl'}': ")


def test_columns_rename_what_a_format_reads(tmp_path: Path) -> None:
    rows = [{"ask": "3+3?", "context": "be short", "say": "6", "past": [["2+2?", "4"]]}]
    columns = {"prompt": ["ask", "context"], "response": "say", "history": "past"}
    texts = ["2+2?", "4", "3+3?\nbe short", "6"]
    for node in ({}, {"format": "alpaca"}, {"format": "ms_swift"}):
        row = opened(tmp_path, rows, columns=columns, **node)[0]
        assert [message["content"] for message in row.messages] == texts and row.extra == {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"history": "[['a', 'b']]"}, "column 'history' has \"[['a', 'b']]\", expected pairs of texts"),
        ({"history": [["a"]]}, "column 'history' has \"[['a']]\", expected pairs of texts: [[question, answer], ...]"),
        ({"input": ["a"]}, "column 'input' has ['a'], expected a text"),
        ({"history": [["a", None]]}, "column 'history' has no value, expected a text"),
        ({"instruction": None, "input": None}, "columns ['instruction', 'input'] are null, expected a text"),
        ({"output": None}, "column 'output' has no value, expected a text"),
        ({"system": 3}, "column 'system' has 3, expected a text"),
    ],
)
def test_a_row_with_a_wrong_value_is_rejected_with_the_reason(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    assert problem in opened(tmp_path, [ALPACA | change], format="alpaca")[0].problem


def test_a_call_and_the_text_before_it_are_one_message_with_one_flag(tmp_path: Path) -> None:
    def said(*flags: dict[str, Any], call: str = '{"name": "weather"}') -> RowSource:
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I look."}]
        turns += [{"role": "tool_call", "content": call}]
        marked = [turn | flag for turn, flag in zip(turns, ({}, *flags), strict=True)]
        return opened(tmp_path, [{"messages": marked}], format="ms_swift")

    message = said({"loss": False}, {"loss": False})[0].messages[1]
    assert message == {
        "role": "assistant", "content": "I look.", "weight": 0, "tool_calls": [{"name": "weather"}]
    }  # fmt: skip
    assert "but their flags are 0 and 1; give both the same" in said({"loss": False}, {"loss": True})[0].problem
    rejected = processor().sample(said({}, {}, call="look!")[0])
    assert isinstance(rejected, Rejected) and "tool_calls[0]: found 'look!'" in rejected.reason


def test_markers_are_media_only_if_the_data_has_a_column_for_them(tmp_path: Path) -> None:
    html = {"conversations": [{"from": "human", "value": "<image> or <video>?"}, {"from": "gpt", "value": "both"}]}
    image, text = {"type": "image"}, {"type": "text", "text": " or <video>?"}
    assert opened(tmp_path, [html], format="sharegpt")[0].messages[0]["content"] == "<image> or <video>?"
    shown = opened(tmp_path, [html | {"images": ["cat.png"]}], format="sharegpt")
    assert shown[0].messages[0]["content"] == [image, text] and shown.shown == {("image", False)}
    unmarked = opened(tmp_path, [html | {"images": []}], format="sharegpt", media_markers=[])
    assert unmarked[0].messages[0]["content"] == "<image> or <video>?" and unmarked.takes_markers


def test_a_column_of_media_that_comes_late_in_the_file_is_read(tmp_path: Path) -> None:
    late = {
        "image": "cat.png",
        "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a"}],
    }
    rows = [CHAT] * 100 + [late]
    for node in ({}, {"format": "llava"}):
        source = opened(tmp_path, rows, **node)
        assert source[100].messages[0]["content"][0] == {"type": "image"} and source[100].media["image"] == ["cat.png"]
        assert source.shown == {("image", False)} and source.columns.images == "image"


def test_media_that_no_message_shows_are_known_before_training(tmp_path: Path) -> None:
    rows = [ROWS["trl"]["history"] | {"images": []}] * 3 + [ROWS["trl"]["media"]]
    for suffix in ("jsonl", "parquet"):
        source = opened(tmp_path, rows, suffix, format="trl")
        assert source.shown == {("image", False)} and 3 in source.first_of_each_kind()
        parts = [part["type"] for part in source[3].messages[0]["content"]]
        assert parts == ["image", "image", "text"] and source[0].messages[0]["content"] == "hi"


def test_a_prompt_of_messages_is_not_trained_and_its_answers_are(tmp_path: Path) -> None:
    row = ROWS["trl"]["masks"]
    weights = [message.get("weight") for message in opened(tmp_path, [row], format="trl")[0].messages]
    assert weights == [0, 0, 0, None]


@pytest.mark.parametrize(
    ("flags", "weight"),
    [
        (({"train": False}, {"weight": 0}), 0),
        (({"train": True}, {}), 1),
        (({}, {}), None),
        (({"train": False}, {}), "the flags of a message and its parts contradict each other"),
        (({"train": False}, {"train": True}), "make a message of each part"),
        (({"loss_scale": 0.5}, {}), "loss_scale 0.5 of a message: expected 0 (not trained) or 1"),
    ],
)
def test_flags_of_parts_are_the_flag_of_their_message(tmp_path: Path, flags: Any, weight: Any) -> None:
    parts = [{"type": "text", "text": text, **flag} for text, flag in zip(("a", "b"), flags, strict=True)]
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": parts}]
    row = opened(tmp_path, [{"messages": said}], format="axolotl")[0]
    assert weight in row.problem if row.problem else row.messages[1].get("weight") == weight
    assert row.problem or [part.keys() for part in row.messages[1]["content"]] == [{"type", "text"}] * 2


def test_a_row_without_messages_is_rejected(tmp_path: Path) -> None:
    rejected = processor().sample(opened(tmp_path, [{"messages": []}], format="openai")[0])
    assert isinstance(rejected, Rejected) and rejected.reason == "the row has no messages"
