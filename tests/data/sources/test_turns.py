"""Data as LLaVA and others write it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from omnitrain.data.chat.parts import calls_of
from omnitrain.data.loading.loader import require_usable
from omnitrain.data.sources.rows import Row, RowSource, open_sources
from omnitrain.data.sources.turns import MARKERS, as_messages, canonical
from omnitrain.errors import DataError, UserError
from omnitrain.recipe import Columns, DataSource, Recipe
from tests.tiny import png, tiny_model, tiny_processor, tiny_recipe


def turns(question: str, **columns: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "7"}], **columns}


ROWS = [turns("hello"), turns("a text with <video> in it"), turns("<image>\nwhich digit?", image="digits/7.png")]


def opened(path: Path, **settings: Any) -> RowSource:
    columns = Columns(messages="conversations", images="image")
    return open_sources([DataSource(path=str(path), columns=columns, media_markers=["image"], **settings)])[0]


def as_lines(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def as_parquet(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    Dataset.from_list([{"image": None} | row for row in rows]).to_parquet(str(folder / "rows.parquet"))
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


@pytest.mark.parametrize(
    ("role", "speakers"),
    {
        "user": ["human"],
        "assistant": ["gpt", "chatgpt", "bing", "bard", "bot", "model"],
        "tool": ["observation", "observations", "tool_response", "function", "ipython"],
        "system": ["system"],
        "developer": ["developer"],
    }.items(),
)
def test_speakers_are_roles(role: str, speakers: list[str]) -> None:
    for one in (role, *speakers):
        for turn in ({"from": one, "value": "a"}, {"role": one, "content": "a"}):
            assert as_messages([turn]) == [{"role": role, "content": "a"}]


@pytest.mark.parametrize("speaker", ["function_call", "tool_call"])
def test_a_call_that_somebody_says_is_one_of_the_assistant(speaker: str) -> None:
    call = '{"name": "weather", "arguments": {"place": "Rome"}}'
    for text in (call, f"[{call}]"):
        (message,) = as_messages([{"from": speaker, "value": text}])
        assert message["role"] == "assistant" and message["content"] is None
        (found,) = calls_of(message)
        assert found["function"] == {"name": "weather", "arguments": {"place": "Rome"}}


@pytest.mark.parametrize("name", ["weight", "loss", "train", "training"])
def test_each_flag_of_training_is_one_flag(name: str) -> None:
    for value in (0, False, 1, True):
        (message,) = as_messages([{"from": "gpt", "value": "a", name: value}])
        assert message == {"role": "assistant", "content": "a", "weight": int(value)}
    assert "weight" not in canonical({"role": "assistant", "content": "a", name: None})
    for wrong in (2, 0.5, "false", [0]):
        with pytest.raises(
            ValueError, match=rf"{name} {re.escape(repr(wrong))} of a message: expected 0 \(not trained"
        ):
            canonical({"role": "assistant", "content": "a", name: wrong})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"weight": 1, "train": False}, "{'weight': 1, 'train': False}, which contradict each other"),
        ({"reasoning": "a", "thinking": "b"}, "{'reasoning': 'a', 'thinking': 'b'}, which contradict"),
        ({"value": "other"}, "{'content': 'said', 'value': 'other'}, which contradict"),
        ({"from": "human"}, "{'role': 'assistant', 'from': 'human'}, which contradict"),
        ({"thinking": ["a"]}, "the thoughts of a message (`reasoning_content`) are ['a'], expected a text"),
    ],
)
def test_names_of_one_field_that_contradict_cost_their_row(tmp_path: Path, fields: Any, named: str) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "said", **fields}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    (row,) = open_sources([DataSource(path=str(tmp_path / "rows.jsonl"))])[0]
    assert named in row.problem
    agreeing = {"role": "assistant", "from": "assistant", "content": "a", "weight": 0, "loss": False, "thinking": "b"}
    assert canonical(agreeing) == {"role": "assistant", "content": "a", "weight": 0, "reasoning_content": "b"}


@pytest.mark.parametrize("write", [as_lines, as_parquet])
def test_a_role_that_nobody_knows_is_an_error_before_training_unless_the_recipe_maps_it(
    tmp_path: Path, write: Any
) -> None:
    late = {"conversations": [{"from": "narrator", "value": "it rains"}, {"from": "gpt", "value": "7"}]}
    path, processor = write(tmp_path, [turns("a") for _ in range(80)] + [late]), tiny_processor(tiny_model())

    def read(**roles: str) -> RowSource:
        return open_sources([DataSource(path=str(path), columns=Columns(messages="conversations"), roles=roles)])[0]

    unknown = r"row 'rows\[80\]' of 'rows': message role 'narrator': .*`roles: {narrator: user}`"
    with pytest.raises(UserError, match=unknown):
        require_usable([read()], processor)
    require_usable([read(narrator="user")], processor)
    for roles in ({"narrator": "user", "gpt": "assistant"}, {"narrator": "narrator", "gpt": "user"}):
        assert [message["role"] for message in read(**roles)[80].messages] == list(roles.values())


def test_roles_are_those_of_messages_in_prompt_and_response_too(tmp_path: Path) -> None:
    path = as_lines(tmp_path, [{"q": [{"role": "narrator", "content": "a"}], "a": [{"role": "clerk", "content": "b"}]}])
    node = f"{{path: {path}, columns: {{prompt: q, response: a}}, roles: {{narrator: user, clerk: assistant}}}}"
    recipe = Recipe.load(tiny_recipe(tmp_path, text_only=True), [f"data.train=[{node}]"])
    (source,) = open_sources(recipe.data.train)
    assert [message["role"] for message in source[0].messages] == ["user", "assistant"]


def test_a_role_that_does_not_exist_is_refused_in_a_recipe() -> None:
    with pytest.raises(ValueError, match=r"found \['asistant'\], expected system, developer, user, assistant, tool"):
        DataSource(path="rows.jsonl", roles={"narrator": "asistant"})


@pytest.mark.parametrize("write", [as_lines, as_parquet])
def test_null_reads_no_column_of_tools_or_system_texts(tmp_path: Path, write: Any) -> None:
    path, columns = write(tmp_path, [turns("a", system="linux", tools="hammer")]), {"messages": "conversations"}
    (source,) = open_sources([DataSource(path=str(path), columns=columns | {"tools": None, "system": None})])
    row = source[0]
    assert [message["role"] for message in row.messages] == ["user", "assistant"] and row.tools is None
    assert row.extra.items() >= {"system": "linux", "tools": "hammer"}.items()
    assert {role for role, _ in source.kinds} == {"human", "gpt"}


@pytest.mark.parametrize("write", [as_lines, as_parquet])
def test_a_column_system_is_the_system_message(tmp_path: Path, write: Any) -> None:
    own = {"conversations": [{"from": "system", "value": "be short"}, *turns("a")["conversations"]]}
    records = [turns("a", system="be short"), turns("a", system=""), turns("a", system=None)]
    records += [own | {"system": None}, own | {"system": "be short"}, own | {"system": "be long"}]
    path = write(tmp_path, records)
    *rows, odd = open_sources([DataSource(path=str(path), columns=Columns(messages="conversations"))])[0]
    found = [[message["content"] for message in row.messages] for row in rows]
    assert found == [["be short", "a", "7"], ["a", "7"], ["a", "7"], ["be short", "a", "7"], ["be short", "a", "7"]]
    assert rows[0].messages[0]["role"] == "system" and "system" not in rows[0].extra
    assert odd.problem == "column 'system' and the first message are two system texts; remove one of them"
    named = Columns(messages="conversations", system="rules")
    path = write(tmp_path, [turns("a", rules="be short", system="x")])
    (row,) = open_sources([DataSource(path=str(path), columns=named)])[0]
    assert row.messages[0] == {"role": "system", "content": "be short"} and row.extra["system"] == "x"


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
    (found,) = open_sources([DataSource(path=str(lines))])
    assert found.schema.said.startswith("read as `format: llava`") and found[0].media["image"] == ["a.png"]
    with pytest.raises(ValueError, match=r"'a.png' in .*; set `media_folder` of the data source"):
        opened(lines)[0].media_bytes("image", 0)
    with pytest.raises(DataError, match=r"expected a list of rows; a file with one row per line ends in \.jsonl"):
        open_sources([DataSource(path=str(lines.rename(tmp_path / "rows.json")))])
    with pytest.raises(UserError, match=r"sources: found 'rows\.jsonl'; expected a list of DataSource"):
        open_sources("rows.jsonl")  # type: ignore[arg-type]
