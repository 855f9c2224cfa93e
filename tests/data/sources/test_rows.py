import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Image, LargeList, List, Value

from omnitrain.data.loading.loader import require_usable
from omnitrain.data.packing.sample import Rejected
from omnitrain.data.sources.rows import Row, RowSource, open_sources
from omnitrain.errors import DataError, UserError
from omnitrain.recipe import Columns, DataSource
from tests.tiny import TASKS, part, tiny_model, tiny_processor, tiny_row, write_parquet


def source(folder: Path, rows: list[Row]) -> RowSource:
    return open_sources([DataSource(path=str(write_parquet(folder / "rows.parquet", rows)))])[0]


def plain(folder: Path, messages: list[Any]) -> RowSource:
    Dataset.from_dict({"messages": messages}).to_parquet(str(folder / "rows.parquet"))
    return open_sources([DataSource(path=str(folder / "rows.parquet"))])[0]


def test_the_first_row_of_each_kind_is_found_however_late_it_comes(tmp_path: Path) -> None:
    rows = [tiny_row("text", i) for i in range(40)]
    rows[30], rows[31], rows[35] = (
        tiny_row("image_to_text", 0),
        tiny_row("image_to_text", 1),
        tiny_row("text_to_image", 0),
    )
    assert source(tmp_path, rows).first_of_each_kind() == [0, 30, 35]


def test_texts_without_parts_have_roles_only(tmp_path: Path) -> None:
    def said(*roles: str) -> list[dict[str, str]]:
        return [{"role": role, "content": "hello"} for role in roles]

    rows = [said("user", "assistant"), said("user", "assistant"), said("system", "user", "assistant")]
    assert plain(tmp_path, rows).first_of_each_kind() == [0, 2]


def test_columns_of_another_type_are_refused_when_the_data_are_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'messages' \(columns\.messages\) has type string, expected messages"):
        plain(tmp_path, ["hello", "world"])
    said = [{"role": "user", "content": "hello"}]
    Dataset.from_dict({"messages": [said], "images": [[7]], "audios": [1.5], "videos": [["a.webp"]]}).to_parquet(
        str(tmp_path / "rows.parquet")
    )
    with pytest.raises(DataError) as caught:
        open_sources([DataSource(path=str(tmp_path / "rows.parquet"))])
    found, *problems = str(caught.value).split("; ")
    assert (
        "column 'images' (columns.images) has type lists of int64, expected files: {bytes, path}, bytes or paths"
        in found
    )
    assert [problem[:40] for problem in problems] == ["column 'audios' (columns.audios) has typ"]


@pytest.mark.parametrize("kind", [List, LargeList])
def test_images_in_lists_of_any_kind_stay_encoded(tmp_path: Path, kind: type) -> None:
    messages = List({"role": Value("string"), "content": Value("string")})
    row = {"messages": [{"role": "user", "content": "hello"}], "images": [{"bytes": b"no image", "path": None}]}
    Dataset.from_list([row], features=Features({"messages": messages, "images": kind(Image())})).to_parquet(
        str(tmp_path / "rows.parquet")
    )
    (rows,) = open_sources([DataSource(path=str(tmp_path / "rows.parquet"))])
    assert rows[0].media_bytes("image", 0) == b"no image"


@pytest.mark.parametrize("medium", [None, "", {"bytes": None, "path": None}])
def test_a_medium_without_content_is_a_damaged_one(medium: Any) -> None:
    row = Row("r", "s", [], {"image": [medium]}, {})
    with pytest.raises(ValueError, match=r"^image 1 has neither bytes nor a path$"):
        row.media_bytes("image", 0)


def test_whatever_a_late_row_asks_in_vain_is_one_error_before_training(tmp_path: Path) -> None:
    rows = [tiny_row("text", i) for i in range(40)]
    rows[20], rows[38] = tiny_row("text_to_image", 0), tiny_row("video_to_text", 0)
    rows[39] = Row("late", "text", [{"role": "tool", "content": [part("text", "no")]}], dict(rows[0].media), {})
    processor = tiny_processor(tiny_model(encoders={}))
    with pytest.raises(UserError) as caught:
        require_usable([source(tmp_path, rows)], processor)
    problems = str(caught.value).splitlines()
    assert len(problems) == 2 and "asks the model to read video" in problems[0] and "message role 'tool'" in problems[1]
    require_usable([source(tmp_path, [tiny_row(task, 0) for task in TASKS])], tiny_processor(tiny_model()))


@pytest.mark.parametrize("given", ["mine [1].parquet", "", "*.parquet"])
def test_brackets_in_the_names_of_files_and_folders_are_only_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    folder = tmp_path / "run [a]"
    folder.mkdir()
    write_parquet(folder / "mine [1].parquet", [tiny_row("text", seed) for seed in range(3)])
    monkeypatch.chdir(folder)
    assert len(RowSource(DataSource(path=given or str(folder)))) == 3


def json_lines(file: Path, *rows: dict[str, Any] | str) -> str:
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(file)


def asked(content: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "7"}], **columns}


def test_rows_of_json_lines_are_what_the_file_says_though_they_differ(tmp_path: Path) -> None:
    (tmp_path / "7.png").write_bytes(b"pixels")
    shown = [{"type": "image"}, {"type": "text", "text": "which?"}]
    first = json_lines(tmp_path / "a.jsonl", asked("which?", label="7"), "", asked(shown, images=f"{tmp_path}/7.png"))
    json_lines(tmp_path / "b.jsonl", asked("which?", label=7, task="digits", id="last"))
    rows = open_sources([DataSource(path=str(tmp_path)), DataSource(path=first)])
    assert [len(table) for table in rows] == [3, 2]
    table = pickle.loads(pickle.dumps(rows[0]))
    assert [row.messages[-1]["content"] for row in table] == ["7"] * 3
    assert [row.extra["label"] for row in table] == ["7", None, 7]
    assert [row.id for row in table] == [f"{tmp_path.name}[0]", f"{tmp_path.name}[1]", "last"]
    assert table[1].media_bytes("image", 0) == b"pixels" and table[0].media["image"] == []
    assert table.by_source() == {tmp_path.name: [0, 1], "digits": [2]}
    assert table.first_of_each_kind() == [0, 1]


def test_lines_that_are_no_rows_are_named_when_the_data_are_opened(tmp_path: Path) -> None:
    file = json_lines(
        tmp_path / "rows.jsonl", asked("hi"), '{"messages": [', "[1]", {"messages": "hi"}, asked("hi", images=[7])
    )
    with pytest.raises(DataError) as caught:
        open_sources([DataSource(path=file)])
    one, two, three, more = str(caught.value).splitlines()
    assert one.startswith(f"data: {file}, line 2: invalid JSON: Expecting value") and "each line of the file" in one
    assert two == f"data: {file}, line 3: found a list, expected an object with the columns of a row"
    assert "line 4: `messages` (columns.messages) is a text, expected a list of messages" in three
    assert more == "data: ... and 1 more lines"


def test_a_file_without_rows_is_said_to_hold_none(tmp_path: Path) -> None:
    file = json_lines(tmp_path / "rows.jsonl", "", " ")
    with pytest.raises(DataError, match=rf"^data: '{file}' holds no rows$"):
        open_sources([DataSource(path=file)])


def test_a_damaged_medium_is_named_by_its_file_and_its_row(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"no image")
    shown = asked([{"type": "image"}, {"type": "text", "text": "what is this?"}], images=["cat.png"])
    file = json_lines(tmp_path / "rows.jsonl", asked("hi"), shown)
    (rows,) = open_sources([DataSource(path=file, media_folder=str(tmp_path))])
    rejected = tiny_processor(tiny_model(decoders={})).sample(rows[1])
    assert isinstance(rejected, Rejected) and rejected.id == "rows[1]"
    assert rejected.reason.startswith(f"image 1 ({tmp_path}/cat.png): unreadable image of 8 bytes: ")


def test_a_folder_of_both_kinds_and_one_of_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file of data at '.*' \(looked in [^)]*\)$"):
        open_sources([DataSource(path=str(tmp_path))])
    json_lines(tmp_path / "rows.jsonl", asked("hi"))
    write_parquet(tmp_path / "rows.parquet", [tiny_row("text", 0)])
    for both in (tmp_path, tmp_path / "rows*"):
        with pytest.raises(DataError, match=r"1 file\(s\) of JSON Lines .* and 1 file\(s\) of parquet") as refused:
            open_sources([DataSource(path=str(both))])
        advised = re.findall(r"'([^']*\*\.\w+)'", str(refused.value))
        assert [len(rows) for rows in open_sources([DataSource(path=path) for path in advised])] == [1, 1]


def test_a_file_that_changes_while_it_is_read_is_a_message(tmp_path: Path) -> None:
    table = open_sources([DataSource(path=json_lines(tmp_path / "rows.jsonl", asked("hi"), asked("you")))])[0]
    json_lines(tmp_path / "rows.jsonl", asked("a longer text than before"))
    with pytest.raises(DataError, match=r"rows\.jsonl changed while it was in use"):
        table[1]


def test_data_sets_of_one_stem_have_names_that_tell_them_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("x/a/rows.jsonl", "x/b/rows.jsonl", "y/b/rows.jsonl", "x/b/more.jsonl")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        json_lines(path, asked("hi"))
    opened = open_sources([DataSource(path=str(path)) for path in (*paths, paths[0])])
    assert [rows.name for rows in opened] == ["a/rows", "x/b/rows", "y/b/rows", "more", "a/rows"]
    assert opened[1][0].id == "x/b/rows[0]"
    assert open_sources([DataSource(path=str(path), name="all") for path in paths])[0].name == "all"


def test_a_recipe_that_spells_the_default_columns_needs_no_more_of_them(tmp_path: Path) -> None:
    file = json_lines(tmp_path / "rows.jsonl", asked("hi"))
    spelled = DataSource.model_validate(DataSource(path=file).model_dump())
    assert len(open_sources([spelled])[0]) == 1
    with pytest.raises(DataError, match=r"column 'functions' \(columns\.tools\) is missing"):
        open_sources([DataSource(path=file, columns=Columns(tools="functions"))])
