"""Files behind URLs: whole and in parts, from servers that are slow, drop connections or have no file."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from omnitrain.data.loading.loader import build_dataloader
from omnitrain.data.sources import json_lines
from omnitrain.data.sources.files import FileReader, ReadError, find_files
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.errors import DataError
from omnitrain.recipe import Data, DataSource
from tests.data.http_server import Server, serving
from tests.tiny import CHAT, png, tiny_model, tiny_processor


@pytest.fixture
def server() -> Iterator[str]:
    with serving() as address:
        yield address


def drops(times: int) -> Any:
    """Cut the first ``times`` answers after half of their bytes."""

    def behave(handler: Server, first: int, body: bytes) -> bytes | None:
        if Server.asked[handler.path[1:] + " cut"] >= times:
            return body
        Server.asked[handler.path[1:] + " cut"] += 1
        handler.wfile.write(body[: len(body) // 2])
        handler.connection.close()
        return None

    return behave


def drips(handler: Server, first: int, body: bytes) -> bytes | None:
    """Send a byte now and then, for ever."""
    for _ in range(200):
        try:
            handler.wfile.write(b"x")
            handler.wfile.flush()
        except OSError:
            return None
        time.sleep(0.05)
    return None


def lines(count: int) -> bytes:
    rows = ({"prompt": f"what is {i}?", "response": str(i), "id": f"row {i}"} for i in range(count))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(count: int) -> bytes:
    stream = io.BytesIO()
    pq.write_table(
        pa.Table.from_pylist([json.loads(line) for line in lines(count).splitlines()]), stream, row_group_size=4
    )
    return stream.getvalue()


def shard(count: int) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for i, line in enumerate(lines(count).splitlines()):
            for suffix, data in (("json", line), ("png", png(i))):
                member = tarfile.TarInfo(f"{i:03}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


MAPPED = {"prompt": "prompt", "response": "response"}


def opened(path: str, **node: Any) -> RowSource:
    return open_sources([DataSource.model_validate({"path": path, "columns": MAPPED, **node})])[0]


CONTENTS = {"rows.jsonl": lines, "rows.parquet": parquet, "rows.tar": shard}


@pytest.mark.parametrize("name", CONTENTS)
def test_rows_of_a_server_and_of_fsspec_are_those_of_the_file(server: str, tmp_path: Path, name: str) -> None:
    content = CONTENTS[name](10)
    Server.files[name] = content
    (tmp_path / name).write_bytes(content)
    with fsspec.open(f"memory://bucket/{name}", "wb") as stream:
        stream.write(content)
    local, *others = (opened(place) for place in (str(tmp_path / name), f"{server}/{name}", f"memory://bucket/{name}"))
    said = [row.messages for row in local]
    for rows in others:
        assert [row.messages for row in rows] == said and [row.id for row in rows] == [f"row {i}" for i in range(10)]


def test_media_of_a_url_are_read_beside_rows_of_this_machine(server: str, tmp_path: Path) -> None:
    Server.files["photos/1.png"] = png(1)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"response": "a cat", "images": ["1.png"]}) + "\n")
    node = {"columns": {"response": "response"}, "media_folder": f"{server}/photos"}
    row = opened(str(tmp_path / "rows.jsonl"), **node)[0]
    assert row.media_bytes("image", 0) == png(1)


def test_ranges_globs_and_folders_name_files_of_a_storage(server: str) -> None:
    system = fsspec.filesystem("memory")
    for i in range(3):
        system.pipe(f"/shards/s-{i}.jsonl", lines(2))
    assert find_files("memory://shards/*.jsonl", (".jsonl",)) == [f"memory:///shards/s-{i}.jsonl" for i in range(3)]
    assert find_files("memory://shards", (".jsonl",)) == find_files("memory://shards/*.jsonl", ())
    assert find_files(f"{server}/s-{{08..10}}.tar", ()) == [f"{server}/s-{i}.tar" for i in ("08", "09", "10")]
    assert len(opened("memory://shards")) == 6


def test_dropped_connections_are_tried_again(server: str) -> None:
    Server.files["rows.jsonl"] = lines(20)
    Server.behave["rows.jsonl"] = drops(times=2)
    assert FileReader(seconds=20).read(f"{server}/rows.jsonl") == lines(20)
    assert Server.asked["rows.jsonl"] == 3


@pytest.mark.parametrize("behave", [drips, drops(times=10**9)])
def test_a_read_never_takes_longer_than_its_deadline(server: str, behave: Any) -> None:
    Server.files["rows.jsonl"] = lines(20)
    Server.behave["rows.jsonl"] = behave
    started = time.monotonic()
    with pytest.raises(
        ReadError, match=r"rows\.jsonl: not read within 0\.5 s \(read_seconds\); tries: \d+, the last: "
    ):
        FileReader(seconds=0.5).read(f"{server}/rows.jsonl", 10, 300)
    assert time.monotonic() - started < 1.5


def test_what_is_not_there_is_not_tried_again(server: str) -> None:
    with pytest.raises(DataError, match=r"no such file: .*none\.jsonl: HTTP Error 404"):
        opened(f"{server}/none.jsonl")
    assert sum(Server.asked.values()) == 1
    with pytest.raises(DataError, match="no file of data at 'memory://nowhere'"):
        opened("memory://nowhere")


def test_rows_that_a_server_does_not_send_are_skipped_and_listed(server: str) -> None:
    """The file is whole while it is opened; then a stretch of it no longer arrives."""
    content = lines(43)
    border = content.index(b'{"prompt": "what is 40?"')
    Server.files["rows.jsonl"] = content
    node = {"path": f"{server}/rows.jsonl", "columns": MAPPED, "read_seconds": 1.0, "epochs": 1}
    data = {"train": [node], "chat": CHAT, "pack_tokens": 200, "packing_buffer": 4, "workers": 0}
    loader = build_dataloader(Data.model_validate(data), tiny_processor(tiny_model()))
    Server.behave["rows.jsonl"] = lambda handler, first, body: body if first < border else drips(handler, first, body)
    seen: list[str] = []
    with pytest.raises(DataError, match="as often as the `epochs`"):
        for (pack,) in loader:
            seen += pack.info.ids
    assert sorted(seen) == sorted(f"row {i}" for i in range(40))
    assert set(loader.rejected) == {f"rows[{i}]" for i in range(40, 43)}
    assert all("not read within 1 s" in row.reason for row in loader.rejected.values())


def test_a_row_group_that_does_not_arrive_costs_one_deadline(server: str) -> None:
    """Its rows fail together, the others arrive, and later it is read again."""
    Server.files["rows.parquet"] = content = parquet(12)
    column = pq.ParquetFile(io.BytesIO(content)).metadata.row_group(1).column(0)
    begin = column.dictionary_page_offset
    rows = opened(f"{server}/rows.parquet", read_seconds=0.5)
    Server.behave["rows.parquet"] = lambda handler, first, body: drips(handler, first, body) if first == begin else body
    started = time.monotonic()
    problems = [row.problem for row in rows]
    assert time.monotonic() - started < 1.5
    assert [bool(problem) for problem in problems] == [*[False] * 4, *[True] * 4, *[False] * 4]
    assert len({*problems[4:8]}) == 1 and "row group 1: " in problems[4] and "not read within 0.5 s" in problems[4]
    Server.behave.clear()
    assert pickle.loads(pickle.dumps(rows))[5].problem == ""  # another process has not met the failure


def test_messages_that_do_not_arrive_when_a_data_set_is_opened_are_an_error(server: str) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "7"}]
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"messages": said}] * 4), stream)
    Server.files["rows.parquet"] = stream.getvalue()
    answers = iter([True])  # for the footer
    Server.behave["rows.parquet"] = lambda *answer: answer[-1] if next(answers, False) else drips(*answer)
    with pytest.raises(DataError, match=r"rows\.parquet': http.*: not read within 0\.5 s"):
        opened(f"{server}/rows.parquet", columns={}, read_seconds=0.5)


def test_a_large_file_of_lines_is_opened_with_few_requests(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "CHECKED_BYTES", 0)
    Server.files["rows.jsonl"] = lines(5000)
    rows = opened(f"{server}/rows.jsonl")
    assert Server.asked["rows.jsonl"] <= 2 + 2 + 2 * 16  # versions, the index, and two looks at some rows
    assert rows.first_of_each_kind() == [0] and rows[4321].id == "row 4321"
    bad = lines(5000).replace(b'{"prompt": "what is 0?"', b'["prompt", "what is 0?"')
    Server.files["bad.jsonl"] = bad
    assert len(opened(f"{server}/bad.jsonl")) == 5000  # one bad line is skipped in training


def test_a_server_without_ranges_is_refused_with_what_to_do(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Server.files["rows.jsonl"] = lines(5)
    original = Server.send_response
    monkeypatch.setattr(Server, "send_response", lambda self, code: original(self, 200))
    with pytest.raises(ReadError, match=r"does not send parts of files \(Range\); copy the file"):
        FileReader().read(f"{server}/rows.jsonl", 3, 9)


class StuckFileSystem(MemoryFileSystem):
    """A storage whose client never returns: its reads have no timeout."""

    protocol = "stuck"
    store: ClassVar[dict[str, Any]] = {}

    def cat_file(self, path: str, **_: Any) -> bytes:
        time.sleep(3600)
        return b""


@pytest.mark.parametrize("workers", [0, 2])
def test_media_that_do_not_arrive_cost_their_rows_and_the_others_are_tried_again_until_they_do(
    server: str, tmp_path: Path, workers: int
) -> None:
    """Of twelve images four never arrive, each in its own way."""
    fsspec.register_implementation("stuck", StuckFileSystem, clobber=True)
    memory = fsspec.filesystem("memory")
    urls = [f"{server}/{i}.png" for i in range(8)] + [f"memory://photos/{i}.png" for i in range(8, 12)]
    for i, url in enumerate(urls):
        Server.files[f"{i}.png"] = png(i)
        if url.startswith("memory"):
            memory.pipe(f"/photos/{i}.png", png(i))
    Server.behave |= {"1.png": drops(times=2), "2.png": drops(times=1), "3.png": drips, "4.png": drops(times=10**9)}
    del Server.files["5.png"]
    urls[9] = "stuck://photos/9.png"
    rows = [{"prompt": "what?", "response": str(i), "id": f"row {i}", "images": [url]} for i, url in enumerate(urls)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    node = {"path": str(tmp_path / "rows.jsonl"), "columns": MAPPED, "media_folder": server, "read_seconds": 0.7}
    data = {"train": [node | {"epochs": 1}], "chat": CHAT, "pack_tokens": 60, "packing_buffer": 2, "workers": workers}
    loader = build_dataloader(Data.model_validate(data), tiny_processor(tiny_model()))
    seen: list[str] = []
    began = time.monotonic()
    with pytest.raises(DataError, match="as often as the `epochs`"):
        for (pack,) in loader:
            seen += pack.info.ids
    assert time.monotonic() - began < 3 * 0.7 + 3  # those that never arrive, and the rest
    missing = {3, 4, 5, 9}
    assert sorted(seen) == sorted(f"row {i}" for i in range(12) if i not in missing)
    reasons = {row.id: row.reason for row in loader.rejected.values()}
    assert set(reasons) == {f"row {i}" for i in missing}
    assert "404" in reasons["row 5"] and "no answer" in reasons["row 9"]
    assert all("not read within 0.7 s (read_seconds)" in reasons[f"row {i}"] for i in missing - {5})
    assert Server.asked["1.png"] == 3 and Server.asked["2.png"] == 2 and Server.asked["5.png"] == 1
