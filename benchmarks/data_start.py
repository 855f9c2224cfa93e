"""How fast data sets of any size start: the index of lines, the first batch, memory, and draws of the order.

Each kind of data set is opened in a process of its own, after a data set of one row ("an empty run"); the figures are
what the large one takes in addition.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import Result, parser, report, start

from omnitrain.data.loading.loader import StepLoader
from omnitrain.data.loading.order import SampleOrder, SourceShare
from omnitrain.data.packing.sample import Sample
from omnitrain.data.sources.files import FileReader
from omnitrain.data.sources.json_lines import row_spans
from omnitrain.data.sources.rows import Row, open_sources
from omnitrain.recipe import Data

FORMULA = (
    "index_rate = bytes / seconds of the first open of a JSON Lines file; index_ratio = index_rate / rate of reading "
    "the file in blocks of 1 MiB (index_cpu_ratio: by CPU time, on a machine that does other work, too), "
    "index_over_lines = index_rate / rate of reading it line by line; *_seconds and *_mb: "
    "from open to the first step, above an empty run; draws_per_second of one slot of eight"
)
DRAWS = 400_000


class Processor:
    """Makes samples of the length of a row's text, without a tokenizer."""

    def sample(self, row: Row, max_tokens: int | None, **options: bool) -> Sample:
        """Return a sample with as many tokens as the document or the last message has characters."""
        text = row.document.text if row.document else row.messages[-1]["content"]
        ids = np.arange(1 + len(text))
        return Sample(row.id, row.source, input_ids=ids, loss_mask=ids > 0, position_ids=ids)


class Virtual:
    """Rows that no file has."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Row:
        messages = [{"role": "assistant", "content": str(position)}]
        return Row(str(position), "virtual", messages, {}, {})


def first_step(kind: str, place: str) -> None:
    """Make the first step of a data set."""
    columns = {"text": "text"} if kind == "parquet" else {}
    node = {"path": place, "columns": columns}
    data = Data.model_validate({"train": [node], "workers": 0, "pack_tokens": 8192})
    sources: Any = [Virtual(int(place))] if kind == "virtual" else open_sources(data.train)
    next(iter(StepLoader(sources, Processor(), data)))  # type: ignore[arg-type]


def child(kind: str, empty: str, place: str) -> None:
    """Print the seconds and MB of a data set's first step, above those of an empty one."""
    first_step(kind, empty)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory begins anew
    before, began = peak_megabytes(), time.perf_counter()
    first_step(kind, place)
    seconds = time.perf_counter() - began
    print(json.dumps([seconds, peak_megabytes() - before]))


def peak_megabytes() -> float:
    """Return the most memory that this process has had at a time, since its peak began anew."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def measured_apart(kind: str, empty: str, place: str) -> tuple[float, float]:
    """Return what :func:`child` prints in a process of its own."""
    command = [sys.executable, __file__, "--child", kind, empty, place]
    seconds, memory = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return seconds, memory


def write_lines(path: Path, rows: int) -> None:
    """Write rows of about 220 bytes."""
    with open(path, "w") as stream:
        for i in range(rows):
            messages = [
                {"role": "user", "content": f"what is {i} plus {i + 1}, and why?"},
                {"role": "assistant", "content": "x" * (i % 200)},
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")


def write_parquet(path: Path, megabytes: int) -> None:
    """Write documents of 100 characters. Each has a blob of 1 MiB zeros beside it, which compress to almost nothing."""
    schema = pa.schema({"text": pa.string(), "blob": pa.binary()})
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        for first in range(0, megabytes, 64):
            count = min(64, megabytes - first)
            texts = [f"{i:0100}" for i in range(first, first + count)]
            writer.write_table(pa.table({"text": texts, "blob": [bytes(1 << 20)] * count}, schema=schema))


def read_plainly(path: Path) -> None:
    """Read a file in blocks."""
    block = bytearray(1 << 20)
    with open(path, "rb", buffering=0) as stream:
        while stream.readinto(block):
            pass


def read_lines(path: Path) -> None:
    """Read a file line by line."""
    with open(path, "rb") as stream:
        for _ in stream:
            pass


def seconds_of(action: Any) -> float:
    """Return how long ``action`` takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def draw() -> None:
    """Draw from a source of a billion rows."""
    order = SampleOrder([SourceShare("rows", 10**9)], seed=0, slots=8)
    assert sum(1 for _ in islice(order.draws(3), DRAWS)) == DRAWS


def measure(rounds: int, lines: int, megabytes: int, folder: Path) -> Result:
    """Measure all cases in each round."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    write_lines(folder / "one.jsonl", 1)
    write_lines(folder / "lines.jsonl", lines)
    write_parquet(folder / "one.parquet", 1)
    write_parquet(folder / "large.parquet", megabytes)
    found: dict[str, list[float]] = {}
    size = (folder / "lines.jsonl").stat().st_size

    def keep(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for round_ in range(rounds):
        read_plainly(folder / "lines.jsonl")  # into the page cache
        cpu = time.process_time()
        keep("plain_rate", size / seconds_of(lambda: read_plainly(folder / "lines.jsonl")))
        keep("plain_cpu_rate", size / (time.process_time() - cpu))
        keep("line_rate", size / seconds_of(lambda: read_lines(folder / "lines.jsonl")))
        os.utime(folder / "lines.jsonl", ns=(round_, round_))  # as if the file had changed
        cpu = time.process_time()
        keep("index_rate", size / seconds_of(lambda: row_spans(str(folder / "lines.jsonl"), FileReader())))
        keep("index_cpu_rate", size / (time.process_time() - cpu))
        keep("draws_per_second", DRAWS / seconds_of(draw))
        for kind, name, empty, place in (
            ("lines", "lines", folder / "one.jsonl", folder / "lines.jsonl"),
            ("parquet", "parquet", folder / "one.parquet", folder / "large.parquet"),
            ("virtual", "billion", 1, 10**9),
        ):
            seconds, memory = measured_apart(kind, str(empty), str(place))
            keep(f"{name}_seconds", seconds)
            keep(f"{name}_mb", max(memory, 1e-3))  # nothing above the empty run
    figures = {name: median(values) for name, values in found.items()}
    ratios = {
        name: median(index / plain for index, plain in zip(found[index_rate], found[rate], strict=True))
        for name, index_rate, rate in (
            ("index_ratio", "index_rate", "plain_rate"),
            ("index_cpu_ratio", "index_cpu_rate", "plain_cpu_rate"),
            ("index_over_lines", "index_rate", "line_rate"),
        )
    }
    kept = sum(file.stat().st_size for file in (folder / "cache").rglob("*") if file.is_file())
    return Result(
        "data_start",
        FORMULA,
        ratios | {"lines": float(lines), "parquet_mib": float(megabytes), "cache_bytes": float(kept)} | figures,
        found,
    )


def main() -> None:
    """Measure and report."""
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return
    options: argparse.ArgumentParser = parser(sys.modules[__name__].__doc__ or "", rounds=5, steps=1)
    options.add_argument("--lines", type=int, default=1_000_000, help="rows of the JSON Lines file")
    options.add_argument("--megabytes", type=int, default=5120, help="uncompressed MiB of the parquet file")
    given = start(options)
    with tempfile.TemporaryDirectory(prefix="omnitrain-data-") as folder:
        report(measure(given.rounds, given.lines, given.megabytes, Path(folder)), given.json)


if __name__ == "__main__":
    main()
