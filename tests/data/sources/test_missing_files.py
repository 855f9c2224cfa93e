"""A row that lacks one of its files is skipped and named, and the others stay."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.data.sources.tar_shards import TarShards
from omnitrain.recipe import Columns, DataSource
from tests.tiny import png, tiny_model, tiny_processor

CAPTIONS = {"images": "jpg", "response": "txt"}


def opened(path: Path, **columns: str) -> RowSource:
    (rows,) = open_sources([DataSource(path=str(path), columns=Columns(**columns))])
    return rows


def write_shard(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def pairs(count: int, without: Iterable[str] = ()) -> list[tuple[str, bytes]]:
    files = [
        (f"{i:03}.{kind}", png(i % 8) if kind == "jpg" else b"cat") for i in range(count) for kind in ("jpg", "txt")
    ]
    return [file for file in files if file[0] not in without]


@pytest.mark.parametrize("count", [4, 400])  # all rows are looked at when the shard is opened; some are
def test_one_missing_caption_costs_one_row(tmp_path: Path, count: int) -> None:
    lost = count - 3
    write_shard(tmp_path / "cats.tar", pairs(count, {f"{lost:03}.txt"}))
    rows = opened(tmp_path / "cats.tar", **CAPTIONS)
    assert [i for i in range(len(rows)) if rows[i].problem] == [lost] and len(rows) == count
    rejected = tiny_processor(tiny_model()).sample(rows[lost])
    assert isinstance(rejected, Rejected) and rejected.id == f"cats/{lost:03}"
    assert rejected.reason == "column 'txt' has no value, expected a text"


def test_a_caption_without_its_image_is_no_sample(tmp_path: Path) -> None:
    write_shard(tmp_path / "cats.tar", [*pairs(5, {"002.jpg"}), ("005.jpeg", png(5)), ("005.txt", b"cat")])
    rows = opened(tmp_path / "cats.tar", **CAPTIONS)
    problem = "the row has no file in 'jpg' (columns.images)"
    assert [row.problem for row in rows] == ["", "", problem, "", "", problem]
    assert rows.kinds == {("user", None): 0, ("user", "image"): 0, ("assistant", None): 0}


def test_a_shard_row_with_a_prompt_needs_its_image_too(tmp_path: Path) -> None:
    asked = json.dumps({"question": "what is it", "answer": "cat"}).encode()
    write_shard(tmp_path / "vqa.tar", [("0.jpg", png(0)), ("0.json", asked), ("1.json", asked)])
    rows = opened(tmp_path / "vqa.tar", images="jpg", prompt="question", response="answer")
    assert [row.problem for row in rows] == ["", "the row has no file in 'jpg' (columns.images)"]


TABLE = [
    {"file": {"path": "a.png"}, "ask": "what", "say": "cat"},
    {"file": None, "ask": "what", "say": "cat"},
    {"file": {"path": ""}, "ask": "", "say": "cat"},
    {"file": {"path": "a.png"}, "ask": None, "say": "cat"},
    {"file": {"path": "a.png"}, "ask": "what", "say": None},
]
NO_FILE, NO_ASK, NO_SAY = (
    "the row has no file in 'file' (columns.images)",
    "column 'ask' has no value, expected a text",
    "column 'say' has no value, expected a text",
)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "fields left out"])
@pytest.mark.parametrize(
    ("columns", "problems"),
    [
        ({"prompt": "ask"}, ["", "", NO_FILE, NO_ASK, NO_SAY]),  # a question without a picture is a text
        ({}, ["", NO_FILE, NO_FILE, "", NO_SAY]),
    ],
)
def test_null_columns_cost_their_rows_in_every_table(
    tmp_path: Path, kind: str, columns: dict[str, str], problems: list[str]
) -> None:
    path, table = tmp_path / f"rows.{kind}", pa.Table.from_pylist(TABLE)
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    elif kind == "json":
        path.write_text(json.dumps(TABLE))
    else:
        path, rows = tmp_path / "rows.jsonl", list(TABLE)
        if kind == "fields left out":
            rows = [{name: value for name, value in row.items() if value is not None} for row in TABLE]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row.problem for row in opened(path, images="file", response="say", **columns)] == problems


def test_a_folder_of_images_lacks_one(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(png(0))
    lines = [{"file_name": f"{i}.png", "text": "cat"} for i in range(2)]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows, processor = opened(tmp_path, images="file_name", response="text"), tiny_processor(tiny_model())
    samples = [processor.sample(row) for row in rows]
    assert isinstance(samples[0], Sample) and isinstance(samples[1], Rejected)
    assert samples[1].reason.startswith("image 1 cannot be read from its file: [Errno 2] No such file")


def test_files_of_a_row_may_be_anywhere_in_its_shard(tmp_path: Path) -> None:
    files = pairs(6)
    unsorted = sorted(files, key=lambda file: (file[0][4:], file[0]))  # all images, then all captions
    write_shard(tmp_path / "sorted.tar", files)
    write_shard(tmp_path / "unsorted.tar", [*unsorted, *pairs(1)])
    expected, found = (opened(tmp_path / f"{name}.tar", **CAPTIONS) for name in ("sorted", "unsorted"))
    assert [(row.messages, row.media) for row in found][:6] == [(row.messages, row.media) for row in expected]
    assert [row.id for row in found] == [f"unsorted/{i:03}" for i in (*range(6), 0)]  # the key begins a second row


def test_files_far_apart_are_read_without_those_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path / "s.tar", [*((f"{i}.jpg", bytes(100_000)) for i in range(20)), ("0.txt", b"cat")])
    rows, read = opened(tmp_path / "s.tar", **CAPTIONS), []
    original = TarShards._read
    monkeypatch.setattr(
        TarShards, "_read", lambda self, *at: read.append(at[-1] - at[-2]) or original(self, *at), raising=True
    )
    row: Any = rows[0]
    assert read == [100_000, 3] and row.messages[-1]["content"] == "cat"
