"""Runs that stop and go on, over every kind of source: a covering array of kinds, mixtures, ranks and workers.

``python -m tests.data.loading.interrupted`` writes the table ``interrupted.tsv`` again.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset

from tests.covering import covering
from tests.data.http_server import Server
from tests.tiny import png

TABLE = Path(__file__).with_name("interrupted.tsv")
ROWS = 240  # of each source; more than a run of 20 steps draws
HUB_ID = "ORG/NAME"

Node = dict[str, Any]


class Case(NamedTuple):
    """A run that stops and goes on; its values are words, so that a table can have them.

    Attributes:
        kind: the kind of source.
        mixture: how it is mixed with another source.
        slots: packs of a step.
        ranks_before, ranks_after: ranks that stop, and that go on.
        workers_before, workers_after: ``data.workers`` of each rank.
    """

    kind: str
    mixture: str
    slots: str
    ranks_before: str
    ranks_after: str
    workers_before: str
    workers_after: str


def asked(i: int) -> str:
    return f"what is {i}{'x' * (i % 5)}"


def said(i: int) -> str:
    return f"{i % 10}" * (1 + i % 3)


def pairs() -> list[Node]:
    return [{"prompt": asked(i), "response": said(i)} for i in range(ROWS)]


def chats() -> list[Node]:
    """Conversations, of which some have too many turns for a pack."""
    return [
        {"messages": [{"role": "user", "content": asked(i)}, {"role": "assistant", "content": said(i)}] * turns(i)}
        for i in range(ROWS)
    ]


def turns(i: int) -> int:
    return 5 if i % 12 == 7 else 1


def sharegpt() -> list[Node]:
    return [
        {"conversations": [{"from": "human", "value": asked(i)}, {"from": "gpt", "value": said(i)}]}
        for i in range(ROWS)
    ]


def texts() -> list[str]:
    """Texts of which many are longer than a pack."""
    return [f"{i} " + "abcde " * (i % 13) for i in range(ROWS)]


def json_lines(rows: Sequence[Node]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def shard(numbers: range) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for i in numbers:
            for suffix, data in (("png", png(i)), ("txt", said(i).encode())):
                member = tarfile.TarInfo(f"{i:04}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


MAPPED = {"prompt": "prompt", "response": "response"}
CAPTIONED = {"images": "png", "response": "txt"}


def parquet(folder: Path) -> Node:
    for part in range(2):
        half = chats()[part * ROWS // 2 : (part + 1) * ROWS // 2]
        pq.write_table(pa.Table.from_pylist(half), folder / f"part-{part}.parquet", row_group_size=16)
    return {"path": str(folder)}


def copied_parquet(folder: Path) -> Node:
    return parquet(folder) | {"copy_parquet": True}


def arrow_file(folder: Path) -> Node:
    table = pa.Table.from_pylist(sharegpt())
    with pa.ipc.new_file(str(folder / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)
    return {"path": str(folder / "rows.arrow"), "columns": {"messages": "conversations"}}


def arrow_stream(folder: Path) -> Node:
    table = pa.Table.from_pylist(pairs())
    with pa.ipc.new_stream(str(folder / "rows.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return {"path": str(folder / "rows.arrow"), "columns": MAPPED}


def llava_lines(folder: Path) -> Node:
    """Conversations that mark their image, beside a folder of images."""
    for i in range(8):
        (folder / f"{i}.png").write_bytes(png(i))
    rows = sharegpt()
    for i, row in enumerate(rows):
        row["conversations"][0]["value"] = f"<image>\n{asked(i)}"
        row["image"] = f"{i % 8}.png"
    (folder / "rows.jsonl").write_bytes(json_lines(rows))
    columns = {"messages": "conversations", "images": "image"}
    node = {"path": str(folder / "rows.jsonl"), "columns": columns, "media_markers": ["image"]}
    return node | {"media_folder": str(folder)}


def message_files(folder: Path) -> Node:
    """Conversations whose parts have their image."""
    (folder / "a.png").write_bytes(png(0))
    rows = chats()
    for i, row in enumerate(rows):
        shown = {"type": "image_url", "image_url": {"url": "a.png"}}
        row["messages"][0] = {"role": "user", "content": [shown, {"type": "text", "text": asked(i)}]}
    (folder / "rows.jsonl").write_bytes(json_lines(rows))
    return {"path": str(folder / "rows.jsonl"), "media_folder": str(folder)}


def json_list(folder: Path) -> Node:
    (folder / "rows.json").write_text(json.dumps(chats(), indent=1))
    return {"path": str(folder / "rows.json")}


def csv(folder: Path) -> Node:
    lines = (f"{row['prompt']},{row['response']}\n" for row in pairs())
    (folder / "rows.csv").write_text("prompt,response\n" + "".join(lines))
    return {"path": str(folder / "rows.csv"), "columns": MAPPED}


def tar_shards(folder: Path) -> Node:
    for number in range(3):
        (folder / f"cats-{number:02}.tar").write_bytes(shard(range(number * ROWS // 3, (number + 1) * ROWS // 3)))
    return {"path": str(folder / "cats-{00..02}.tar"), "columns": CAPTIONED}


def media_folder(folder: Path) -> Node:
    for i in range(8):
        (folder / f"{i}.png").write_bytes(png(i))
    rows = [{"file_name": f"{i % 8}.png", "caption": said(i)} for i in range(ROWS)]
    (folder / "metadata.jsonl").write_bytes(json_lines(rows))
    return {"path": str(folder), "columns": {"images": "file_name", "response": "caption"}}


def text_files(folder: Path) -> Node:
    for i, text in enumerate(texts()):
        (folder / f"{i:04}.txt").write_text(text)
    (folder / "long.txt").write_text(" ".join(texts()))  # several rows
    return {"path": str(folder)}


def text_column(folder: Path) -> Node:
    pq.write_table(pa.table({"content": texts()}), folder / "rows.parquet", row_group_size=40)
    return {"path": str(folder / "rows.parquet"), "columns": {"text": "content"}}


def saved_data_set(folder: Path) -> Node:
    Dataset.from_list(chats()).save_to_disk(str(folder), num_shards=2)
    (folder / "README.md").write_text("# Chats")
    return {"path": str(folder)}


def hub(folder: Path) -> Node:
    """A data set of the Hub, for which the test puts :func:`hub_data_set` into the place of the Hub."""
    return {"path": HUB_ID, "subset": "en", "columns": MAPPED}


def hub_data_set(path: str, *, streaming: bool = False, **options: Any) -> Dataset | IterableDataset:
    assert (path, options["name"]) == (HUB_ID, "en")
    rows = Dataset.from_list(pairs())
    return rows.to_iterable_dataset(num_shards=5) if streaming else rows


def stream(folder: Path) -> Node:
    return hub(folder) | {"streaming": True}


def in_memory(name: str, content: bytes) -> str:
    with fsspec.open(f"memory://bucket/{name}", "wb") as stream:
        stream.write(content)
    return f"memory://bucket/{name}"


def url_of_lines(folder: Path) -> Node:
    return {"path": in_memory("rows.jsonl", json_lines(pairs())), "columns": MAPPED}


def url_of_parquet(folder: Path) -> Node:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(chats()), stream, row_group_size=40)
    return {"path": in_memory("rows.parquet", stream.getvalue())}


def url_of_shards(folder: Path) -> Node:
    for number in range(2):
        in_memory(f"shards/{number}.tar", shard(range(number * ROWS // 2, (number + 1) * ROWS // 2)))
    return {"path": "memory://bucket/shards", "columns": CAPTIONED}


def http_of_shards(folder: Path) -> Node:
    for number in range(2):
        Server.files[f"{number}.tar"] = shard(range(number * ROWS // 2, (number + 1) * ROWS // 2))
    return {"path": f"{Server.address}/{{0..1}}.tar", "columns": CAPTIONED}


KINDS: dict[str, Callable[[Path], Node]] = {
    "parquet": parquet,
    "copied parquet": copied_parquet,
    "arrow file": arrow_file,
    "arrow stream": arrow_stream,
    "json lines": llava_lines,
    "message files": message_files,
    "json": json_list,
    "csv": csv,
    "tar shards": tar_shards,
    "media folder": media_folder,
    "text files": text_files,
    "text column": text_column,
    "saved data set": saved_data_set,
    "hub": hub,
    "stream": stream,
    "url of json lines": url_of_lines,
    "url of parquet": url_of_parquet,
    "url of tar shards": url_of_shards,
    "http of tar shards": http_of_shards,
}
LONG = ("parquet", "copied parquet", "message files", "json", "saved data set", "url of parquet")  # have `chats`


def alone(node: Node, other: Node) -> Node:
    return {"train": [node]}


def weighted(node: Node, other: Node) -> Node:
    return {"train": [node, other | {"weight": 0.5}]}


def by_tokens(node: Node, other: Node) -> Node:
    return weighted(node, other) | {"weights_by": "tokens"}


def staged(node: Node, other: Node) -> Node:
    """The second stage begins when the run stops, and the third later."""
    stages = [
        {"from_step": 2, "weights": {"first": 3}},
        {"from_step": 4, "weights": {"first": 0, "other": 1}},
        {"from_step": 7, "weights": {"first": 2}},
    ]
    return weighted(node, other) | {"stages": stages}


def split(node: Node, other: Node) -> Node:
    """Conversations that are too long become several samples; in the other mixtures they are rejected."""
    return weighted(node | {"overlong": "split"}, other)


def in_epochs(node: Node, other: Node) -> Node:
    """The first source ends after two and a half epochs of its first rows."""
    return {"train": [node | {"limit": 8, "epochs": 2.5}, other]}


MIXTURES: dict[str, Callable[[Node, Node], Node]] = {
    "alone": alone,
    "tokens": by_tokens,
    "stages": staged,
    "epochs": in_epochs,
    "split": split,
}
RANKS, WORKERS, SLOTS = ("1", "2", "3", "4"), ("0", "1", "3"), ("2", "3")


def data_of(node: Node, mixture: str, folder: Path) -> Node:
    """Return the ``data`` of a recipe: a source of the case's kind, and for most mixtures one more."""
    (folder / "other.jsonl").write_bytes(json_lines([{"prompt": f"other {i}", "response": "ok"} for i in range(ROWS)]))
    other = {"path": str(folder / "other.jsonl"), "columns": MAPPED, "name": "other"}
    return MIXTURES[mixture](node | {"name": "first"}, other)


def is_possible(case: Case) -> bool:
    """Whether the source has conversations to split."""
    return case.kind in LONG or case.mixture != "split"


def possible() -> list[Case]:
    cases = (Case(*values) for values in product(KINDS, MIXTURES, SLOTS, RANKS, RANKS, WORKERS, WORKERS))
    return [case for case in cases if is_possible(case)]


def table() -> list[Case]:
    return [Case(*line.split("\t")) for line in TABLE.read_text().splitlines()]


def each_value() -> Iterator[Case]:
    """Rows of the table that have each value, and start few processes."""
    few = [case for case in table() if num_processes(case) <= 5]
    return covering(few, lambda case: set(enumerate(case)))


def num_processes(case: Case) -> int:
    before, after = int(case.ranks_before) * int(case.workers_before), int(case.ranks_after) * int(case.workers_after)
    return before + after


if __name__ == "__main__":
    TABLE.write_text("".join("\t".join(case) + "\n" for case in covering(possible())))
