"""Every format of data sets, read where it lies: the same rows, in any order, from any process."""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import pickle
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from omnitrain.data.loading.loader import build_dataloader
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.sources import documents, json_lines, parquet_rows
from omnitrain.data.sources.files import FileReader
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.errors import DataError
from omnitrain.recipe import Data, DataSource
from tests.tiny import CHAT, png, tiny_model, tiny_processor

PAIRS = [{"prompt": f"what is {i}?", "response": str(i), "label": f"0{i}"} for i in range(12)]
MAPPED = {"prompt": "prompt", "response": "response"}


def opened(path: Path | str, **node: Any) -> RowSource:
    return open_sources([DataSource.model_validate({"path": str(path), **node})])[0]


def write_jsonl(path: Path) -> None:
    path.write_text("\n\n".join(map(json.dumps, PAIRS)) + "\n  \n")


def write_json(path: Path) -> None:
    path.write_text(json.dumps(PAIRS, indent=1).replace("what", "wh\u00e4t \u6587"), encoding="utf-8")


def write_csv(path: Path) -> None:
    lines = [f'"what is\n{row["response"]}?",{row["response"]},{row["label"]}' for row in PAIRS]
    path.write_text("\n".join(["prompt,response,label", *lines]) + "\n")


def write_arrow(path: Path) -> None:
    table = pa.Table.from_pylist(PAIRS)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def write_arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(PAIRS)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def write_parquet_groups(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(PAIRS), path, row_group_size=5)


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for i, row in enumerate(PAIRS):
            add(tar, f"part/{i:04}.json", json.dumps({"prompt": row["prompt"], "label": row["label"]}).encode())
            add(tar, f"part/{i:04}.txt", row["response"].encode())


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "jsonl": ("rows.jsonl", write_jsonl),
    "json": ("rows.json", write_json),
    "csv": ("rows.csv", write_csv),
    "arrow stream": ("rows.arrow", write_arrow),
    "arrow file": ("rows.arrow", write_arrow_file),
    "parquet": ("rows.parquet", write_parquet_groups),
    "tar": ("rows.tar", write_tar),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_prompts_and_responses_of_any_format_are_messages(tmp_path: Path, kind: str) -> None:
    name, write = WRITERS[kind]
    write(tmp_path / name)
    rows = opened(tmp_path / name, columns=MAPPED | ({"response": "txt"} if kind == "tar" else {}))
    rows = pickle.loads(pickle.dumps(rows))
    assert len(rows) == 12
    for position in (11, 0, 7, 7):
        row = rows[position]
        assert [message["role"] for message in row.messages] == ["user", "assistant"]
        assert row.messages[0]["content"].split()[-1] == f"{position}?"
        assert row.messages[1]["content"] == str(position) and row.extra["label"] == f"0{position}"
    assert rows.first_of_each_kind() == [0]
    sample = tiny_processor(tiny_model()).sample(rows[3])
    assert isinstance(sample, Sample) and sample.loss_mask.sum() == 2
    assert len(opened(tmp_path / name, columns=rows.columns.model_dump(), limit=5)) == 5


def test_a_tar_shard_has_media_beside_their_captions(tmp_path: Path) -> None:
    for shard in range(2):
        with tarfile.open(tmp_path / f"cats-{shard:03}.tar", "w") as tar:
            for i in range(3):
                add(tar, f"{i}.jpg", png(3 * shard + i))
                add(tar, f"{i}.txt", f"cat {3 * shard + i}".encode())
    rows = opened(tmp_path / "cats-{000..001}.tar", columns={"images": "jpg", "response": "txt"})
    assert [row.id for row in rows] == [f"cats-{i // 3:03}/{i % 3}" for i in range(6)]
    assert [row.messages[-1]["content"] for row in rows] == [f"cat {i}" for i in range(6)]
    assert rows[4].media_bytes("image", 0) == png(4) and rows.shown == {("image", False)}
    sample = tiny_processor(tiny_model()).sample(rows[4])
    assert isinstance(sample, Sample) and [span.component for span in sample.spans] == ["image_encoder"]


@pytest.mark.parametrize("kind", ["tar", "parquet", "arrow"])
def test_no_bytes_of_media_are_read_when_a_data_set_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    image, path, columns = b"\x89" * 4_000_000, tmp_path / f"rows.{kind}", {"images": "png", "response": "txt"}
    table = pa.table({"png": [{"bytes": image, "path": None}] * 4, "txt": [f"cat {i}" for i in range(4)]})
    if kind == "tar":
        with tarfile.open(path, "w") as tar:
            for i in range(4):
                add(tar, f"{i}.png", image)
                add(tar, f"{i}.txt", f"cat {i}".encode())
    elif kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    read: list[str] = []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, i, columns: read.extend(columns) or original(self, i, columns)
    )
    opened(path, columns=columns)  # builds the index
    tracemalloc.start()
    rows = opened(path, columns=columns)
    outlined = [] if kind == "parquet" else [rows.outline(position) for position in range(4)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(image) and set(read) <= {"png.path", "txt"}
    assert rows.shown == {("image", False)} and rows.first_of_each_kind() == [0]
    assert [row.media["image"][0]["bytes"] for row in outlined] == [True] * len(outlined)
    monkeypatch.undo()
    assert rows[3].media_bytes("image", 0) == image


def test_a_compressed_or_cut_tar_is_refused_with_what_to_do(tmp_path: Path) -> None:
    write_tar(tmp_path / "rows.tar")
    (tmp_path / "gz.tar").write_bytes(gzip.compress((tmp_path / "rows.tar").read_bytes()))
    with pytest.raises(DataError, match=r"gz\.tar: not an uncompressed tar file .*gunzip"):
        opened(tmp_path / "gz.tar", columns={"response": "txt"})


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_folder_of_hf_datasets_has_descriptions_beside_its_rows(tmp_path: Path, name: str) -> None:
    if name == "rows.arrow":
        Dataset.from_list(PAIRS).save_to_disk(str(tmp_path))
    else:
        Dataset.from_list(PAIRS).to_parquet(str(tmp_path / name))
    (tmp_path / "README.md").write_text("# Questions")
    rows = opened(tmp_path, columns=MAPPED)
    assert [row.messages[1]["content"] for row in rows] == [str(i) for i in range(12)]
    (tmp_path / "alone").mkdir()
    (tmp_path / "README.md").rename(tmp_path / "alone" / "README.md")
    assert opened(tmp_path / "alone")[0].document == documents.Document("# Questions")


def test_a_folder_with_a_manifest_has_its_media(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.png").write_bytes(png(1))
    (tmp_path / "metadata.csv").write_text("file_name,caption\nphotos/1.png,a cat\n")
    rows = opened(tmp_path, columns={"images": "file_name", "response": "caption"})
    assert rows[0].media_bytes("image", 0) == png(1)
    assert rows[0].messages[1] == {"role": "assistant", "content": "a cat"}


def test_parquet_is_read_in_row_groups_of_which_few_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_rows, "_KEPT_BYTES", 0)
    table = pa.table({"text": [f"document {i}" for i in range(1000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    reads: list[int] = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, i, **options: reads.append(i) or read(self, i, **options)
    )
    data = Data.model_validate({"train": [{"path": str(tmp_path), "columns": {"text": "text"}}], "workers": 0})
    loader = build_dataloader(data, tiny_processor(tiny_model()), seed=1)
    assert loader.sources[0].blocks == (50,) * 20
    rows = [draw[2] for draw, _ in zip(loader.order.draws(), range(1000), strict=False)]
    assert sorted(rows) == list(range(1000))
    texts = [loader.sources[0][row].document.text for row in rows]
    assert texts == [f"document {row}" for row in rows]
    assert sorted(reads) == list(range(20))  # each once, though rows are shuffled


def test_a_limit_cuts_row_groups_and_keeps_them_together(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": list("abcdefghij")}), tmp_path / "a.parquet", row_group_size=2)
    for limit, blocks in ((None, (2,) * 5), (10, (2,) * 5), (7, (2, 2, 2, 1)), (1, (1,))):
        assert opened(tmp_path / "a.parquet", columns={"text": "text"}, limit=limit).blocks == blocks


def damage(file: Path, group: int) -> None:
    """Overwrite all columns of a row group."""
    found, content = pq.ParquetFile(file).metadata.row_group(group), bytearray(file.read_bytes())
    for column in map(found.column, range(found.num_columns)):
        start = column.dictionary_page_offset
        content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(content)


def test_a_damaged_row_group_costs_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": list("abcdef")}), file, row_group_size=2)
    damage(file, group=1)
    rows = opened(file, columns={"text": "text"})
    assert [bool(row.problem) for row in rows] == [False, False, True, True, False, False]
    assert "a.parquet, row group 1: " in rows[2].problem


def test_a_damaged_row_group_of_messages_is_passed_over_when_kinds_are_searched(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "7"}]
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": said, "task": "chat"}] * 6), file, row_group_size=2)
    damage(file, group=1)
    rows = opened(file)
    assert [bool(row.problem) for row in rows] == [False, False, True, True, False, False]
    assert rows.first_of_each_kind() == [0] and rows.by_source() == {"chat": [0, 1, 4, 5], "a": [2, 3]}


def test_copied_parquet_is_shuffled_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_parquet_groups(tmp_path / "rows.parquet")
    rows = opened(tmp_path / "rows.parquet", columns=MAPPED, copy_parquet=True)
    assert rows.blocks == () and rows[5].messages[1]["content"] == "5"


@pytest.mark.parametrize("text", ["one line\n" * 20_000, "\u6587" * 60_000, "words " * 30_000])
def test_long_texts_are_cut_and_come_together_again(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text("short", encoding="utf-8")
    (tmp_path / "c.txt").write_text("")
    rows = opened(tmp_path)
    parts = [row.document for row in rows]
    assert "".join(part.text for part in parts[:-1]) == text and parts[-1] == documents.Document("short")
    assert [part.begins for part in parts] == [True, *[False] * (len(parts) - 2), True]
    assert [part.ends for part in parts] == [*[False] * (len(parts) - 2), True, True]
    assert len(parts) > 3


def test_documents_become_pieces_with_an_end_and_no_token_is_lost(tmp_path: Path) -> None:
    text = "".join(f"{i} <|end|> " for i in range(60))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "ab"}) + "\n")
    processor = tiny_processor(tiny_model())
    rows = opened(tmp_path / "rows.jsonl", columns={"text": "text"})
    sample = processor.sample(rows[0], max_tokens=100)
    assert isinstance(sample, Sample)
    pieces = [sample, *sample.more]
    assert max(map(len, pieces)) <= 100 and {piece.num_pieces for piece in pieces} == {len(pieces)}
    ids = np.concatenate([piece.input_ids for piece in pieces]).tolist()
    assert processor.tokenizer.decode(ids[:-1]) == text and ids[-1] == processor.tokenizer.eos_token_id
    assert processor.tokenizer.eos_token_id not in ids[:-1]  # `<|end|>` in a text stays text
    assert all(piece.position_ids[0] == 0 and piece.loss_mask.all() for piece in pieces)
    short = processor.sample(rows[1], max_tokens=100, without_tail=True)
    assert isinstance(short, Sample) and (len(short.input_ids), len(short)) == (3, 2)


def test_a_large_file_is_indexed_and_its_bad_lines_cost_a_row_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "CHECKED_BYTES", 0)
    monkeypatch.setattr(json_lines, "_CHECKED_ROWS", 5)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "7"}]
    lines = [json.dumps({"messages": said, "id": f"row {i}"}) for i in range(100)]
    lines[50] = '{"messages": ['
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:50], "", " ", *lines[50:]]))
    rows = opened(tmp_path / "rows.jsonl")
    assert [rows[i].id for i in (0, 99, 51)] == ["row 0", "row 99", "row 51"]
    rejected = tiny_processor(tiny_model()).sample(rows[50])
    assert isinstance(rejected, Rejected) and rejected.id == "rows[50]"
    assert "rows.jsonl, line 53: invalid JSON" in rejected.reason
    assert rows.first_of_each_kind() == [0] and list(rows.by_source()) == ["rows"]
    (tmp_path / "none.jsonl").write_text("1\n2\n")
    with pytest.raises(DataError, match=r"none\.jsonl, line 1: found 1, expected an object"):
        opened(tmp_path / "none.jsonl")


def test_short_and_long_lines_are_told_from_blank_ones(tmp_path: Path) -> None:
    lines = ["  " if i % 3 == 0 else "" if i % 7 == 0 else str(i) * (1 + i % 400) for i in range(2000)]
    content = "\n".join(lines).encode()
    (tmp_path / "rows.jsonl").write_bytes(content)
    starts, stops = json_lines.row_spans(str(tmp_path / "rows.jsonl"), FileReader())
    found = [content[start:stop].strip().decode() for start, stop in zip(starts, stops, strict=True)]
    assert found == [line for line in lines if line.strip()] and stops[-1] == len(content)


@pytest.mark.parametrize("name", ["mkdir", "flock"])
def test_a_cache_folder_that_cannot_be_used_costs_no_more_than_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("Function not implemented")

    write_jsonl(tmp_path / "rows.jsonl")
    monkeypatch.setattr(*((Path, "mkdir") if name == "mkdir" else (fcntl, "flock")), refuse)
    for _ in range(2):
        assert len(opened(tmp_path / "rows.jsonl", columns=MAPPED)) == 12


def test_an_index_is_built_once_and_again_if_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[str] = []
    build = json_lines._borders_of_lines

    def counted(file: str, reader: FileReader) -> Any:
        builds.append(file)
        return build(file, reader)

    monkeypatch.setattr(json_lines, "_borders_of_lines", counted)
    write_jsonl(tmp_path / "rows.jsonl")
    for _ in range(3):
        assert len(opened(tmp_path / "rows.jsonl", columns=MAPPED)) == 12
    assert len(builds) == 1
    with open(tmp_path / "rows.jsonl", "a") as stream:
        stream.write(json.dumps(PAIRS[0]) + "\n")
    assert len(opened(tmp_path / "rows.jsonl", columns=MAPPED)) == 13 and len(builds) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # nothing can be written there
    assert len(opened(tmp_path / "rows.jsonl", columns=MAPPED)) == 13


def test_a_hub_data_set_is_asked_for_its_subset_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(path: str, **options: Any) -> Dataset:
        asked.append((path, options))
        return Dataset.from_list(PAIRS)

    monkeypatch.setattr("datasets.load_dataset", load)
    rows = opened("ORG/NAME", subset="en", revision="v2", split="test", columns=MAPPED)
    assert asked == [("ORG/NAME", {"name": "en", "revision": "v2", "split": "test"})] and len(rows) == 12


@pytest.mark.parametrize(
    ("row", "columns", "problem"),
    [
        ({"a": 3}, {"response": "a"}, "column 'a' has 3, expected a text"),
        ({"a": None}, {"text": "a"}, "column 'a' has no value, expected a text"),
        ({"a": ""}, {"text": "a"}, "the document is empty"),
    ],
)
def test_a_row_without_its_text_is_rejected_with_the_column(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], problem: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    rejected = tiny_processor(tiny_model()).sample(opened(tmp_path / "rows.jsonl", columns=columns)[0])
    assert isinstance(rejected, Rejected) and rejected.reason == problem


def test_json_that_is_no_whole_list_is_refused(tmp_path: Path) -> None:
    for content, message in (('[{"a": 1}, ', "the list has no end"), ('[{"a": }]', "entry 1: invalid JSON")):
        (tmp_path / "rows.json").write_text(content)
        with pytest.raises(DataError, match=message):
            opened(tmp_path / "rows.json", columns={"text": "a"})


def test_pieces_of_documents_fill_packs(tmp_path: Path) -> None:
    texts = [f"{i} " * (20 + 30 * i) for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    node = {"path": str(tmp_path / "rows.jsonl"), "columns": {"text": "text"}, "epochs": 1}
    data = Data.model_validate({"train": [node], "chat": CHAT, "pack_tokens": 100, "packing_buffer": 8, "workers": 0})
    loader = build_dataloader(data, tiny_processor(tiny_model()))
    tokens, packs = 0, []
    with pytest.raises(DataError, match="as often as the `epochs`"):
        for (pack,) in loader:
            packs.append(pack.num_tokens)
            tokens += pack.num_tokens
    assert tokens == sum(len(text) + 1 for text in texts) and max(packs) <= 100
    assert np.mean(packs[:-2]) > 85
