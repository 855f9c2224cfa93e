"""Data sets that can only be iterated: rows by position, passes, and runs that resume by skipping."""

from __future__ import annotations

import itertools
import json
import pickle
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import IterableDataset
from pydantic import ValidationError

from omnitrain.data.loading.loader import StepLoader, build_dataloader
from omnitrain.data.loading.slots import LoaderState, SlotState
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources import stream
from omnitrain.data.sources.files import ReadError
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.data.sources.schema import schema_of
from omnitrain.data.sources.stream import Stream
from omnitrain.errors import DataError, UserError
from omnitrain.recipe import Data, DataSource, Recipe
from omnitrain.recipe.problems import problem_lines
from omnitrain.train.epochs import in_steps
from omnitrain.train.trainer import Trainer
from omnitrain.train.verbs.preview import data_stats
from tests.tiny import CHAT, png, tiny_model, tiny_processor, tiny_recipe

ROWS = 100
NODE = {"path": "ORG/NAME", "streaming": True, "columns": {"images": "image", "response": "text"}}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the Hub: a data set of three files of this machine, which `datasets` streams."""
    for part in range(3):
        numbers = range(part * ROWS // 3, (part + 1) * ROWS // 3)
        images = [{"bytes": png(i), "path": None} for i in numbers]
        table = pa.table({"image": images, "text": [f"{i}" for i in numbers]})
        pq.write_table(table, tmp_path / f"part-{part}.parquet", row_group_size=10)
    load, files = datasets.load_dataset, str(tmp_path / "part-*.parquet")

    def load_dataset(path: str, *, streaming: bool, split: str, **_: Any) -> IterableDataset:
        assert path == "ORG/NAME"
        return load("parquet", data_files=files, streaming=streaming, split=split)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def opened(**node: Any) -> RowSource:
    return open_sources([DataSource.model_validate(NODE | node)])[0]


def text(rows: RowSource, position: int) -> str:
    return rows[position].messages[-1]["content"]


def test_rows_are_those_of_the_files_in_their_order_and_in_every_pass(hub: None) -> None:
    rows = opened()
    assert rows.is_stream and rows.shown == {("image", False)} and rows.first_of_each_kind() == [0]
    for position in (0, 3, 70, 66, 99, 100, 265, 30, 101):
        assert text(rows, position) == str(position % ROWS)
    assert rows[1071].media_bytes("image", 0) == png(71)
    copied = pickle.loads(pickle.dumps(rows))
    assert [text(copied, position) for position in range(60, 140)] == [str(i % ROWS) for i in range(60, 140)]


@pytest.mark.parametrize(("name", "most"), [("_MOST_WAITING", 4), ("_MOST_BYTES", 2000)])
def test_a_slot_that_is_far_behind_reads_with_a_cursor_of_its_own(
    hub: None, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(stream, name, most)
    started: list[int] = []
    start = Stream._rows_from
    monkeypatch.setattr(Stream, "_rows_from", lambda self, at: started.append(at) or start(self, at))
    rows = opened()
    for ahead, behind in zip(range(90, 200), range(64, 90), strict=False):
        assert (text(rows, ahead), text(rows, behind)) == (str(ahead % ROWS), str(behind))
    assert started == [0, 0, 64, 100]  # to open it, the first cursor, that of the second slot, and the second pass


@cache
def processor() -> OmniProcessor:
    return tiny_processor(tiny_model())


def loader(state: LoaderState | None = None, **node: Any) -> StepLoader:
    data = {"train": [NODE | node], "chat": CHAT, "pack_tokens": 60, "packing_buffer": 6, "workers": 0}
    return build_dataloader(Data.model_validate(data), processor(), slots=2, state=state)


def run(loader: StepLoader, steps: int) -> Iterator[list[tuple[int, str]]]:
    for packs in itertools.islice(iter(loader), steps):
        infos = [pack.info for pack in packs]
        yield sorted(pair for info in infos for pair in zip(info.indices, info.ids, strict=True))


@pytest.mark.parametrize(("limit", "stops"), [(None, [20]), pytest.param(40, [5, 20], marks=pytest.mark.second)])
def test_a_run_resumes_in_any_pass_and_says_what_it_skips(hub: None, limit: int | None, stops: list[int]) -> None:
    uncut = list(run(loader(limit=limit), 30))
    rows = [int(name.removeprefix("NAME[").removesuffix("]")) for step in uncut for _, name in step]
    assert max(rows) == (39 if limit else max(index for step in uncut for index, _ in step))
    for stop in stops:
        first = loader(limit=limit)
        begun = list(run(first, stop))
        state = LoaderState.from_saved(asdict(first.state()))
        trained = {index for step in begun for index, _ in step}
        needed = next(i for i in itertools.count() if i not in trained)
        assert state.skipped == ((needed,) if limit is None or needed < limit else (0,)) and needed > 0
        assert begun + list(run(loader(state, limit=limit), 30 - stop)) == uncut


def test_the_deadline_of_a_row_does_not_count_how_long_the_stream_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow() -> Iterator[dict[str, Any]]:
        for i in range(200):
            time.sleep(0.01)
            yield {"image": {"bytes": png(i), "path": None}, "text": f"{i}"}

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: IterableDataset.from_generator(slow))
    state = LoaderState(slots={0: SlotState(100), 1: SlotState(101)})  # a second after the begin
    resumed = loader(state, sample_seconds=0.5)
    ((first, *_), *_) = run(resumed, 1)
    assert first == (100, "NAME[100]") and not resumed.rejected


def test_a_stream_that_breaks_costs_a_row_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {70, 71}

    def rows() -> Iterator[dict[str, Any]]:
        for i in range(100):
            if i in broken:
                broken.remove(i)
                raise OSError("the line is dead")
            yield {"text": f"{i}"}

    monkeypatch.setattr(stream, "_ROWS_AT_A_TIME", 1)
    found = Stream(IterableDataset.from_generator(rows), partial(schema_of, DataSource(path="ORG/NAME")))
    assert found[69] == {"text": "69"}
    for position in (70, 71):
        with pytest.raises(ReadError, match=f"row {position} of the stream: .*the line is dead"):
            found[position]
    assert [found[position]["text"] for position in (72, 70, 99)] == ["72", "70", "99"]


def test_a_stream_that_always_breaks_in_the_same_place_is_not_read_again_and_again() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from ({"text": f"{i}"} for i in range(96))
        raise OSError("the shard is damaged")

    found = Stream(IterableDataset.from_generator(rows), partial(schema_of, DataSource(path="ORG/NAME")))
    for position in (96, 97):
        with pytest.raises(ReadError, match=f"row {position} of the stream: .*the shard is damaged"):
            found[position]
    with pytest.raises(DataError, match=r"the stream breaks at row 96 in each of 3 tries: .*the shard is damaged"):
        found[98]


def test_what_needs_the_length_of_a_stream_is_refused(hub: None, tmp_path: Path) -> None:
    for train, heldout, message in (
        ({"epochs": 1}, [], "train.0.epochs: a streamed data set has no known length, which `epochs` needs"),
        ({}, [NODE], "heldout.0.streaming: a streamed data set has no known length, which evaluation needs"),
    ):
        with pytest.raises(ValidationError) as refused:
            Data.model_validate({"train": [NODE | train], "heldout": heldout})
        assert message in "\n".join(problem_lines(refused.value, Data))
    (tmp_path / "recipe").mkdir()
    path = str(tiny_recipe(tmp_path / "recipe"))
    node = "{path: ORG/NAME, streaming: true, columns: {images: image, response: text}}"
    with pytest.raises(UserError, match=r"train\.epochs: data\.train has a streamed data set"):
        in_steps(Recipe.load(path, [f"data.train=[{node}]", "train.steps=1000", "train.epochs=1"]))


def test_statistics_measure_the_first_rows_of_a_stream(hub: None, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    path = str(tiny_recipe(tmp_path / "recipe"))
    node = "{path: ORG/NAME, streaming: true, columns: {images: image, response: text}}"
    stats = data_stats(Recipe.load(path, [f"data.train=[{node}]"]), rows=30)
    (found,) = stats.data_sets
    assert (found.rows, found.measured, found.epochs, found.share) == (None, 30, None, 1.0)
    assert stats.packing is not None and "stream" in str(stats)


def test_a_training_run_goes_on_where_its_checkpoint_says(hub: None, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    path = str(tiny_recipe(tmp_path / "recipe", text_only=True))
    node = "{path: ORG/NAME, streaming: true, columns: {text: text}}"
    losses, skipped = [], []
    for name, stop in (("uncut", 6), ("resumed", 3), ("resumed", 6)):
        overrides = [f"data.train=[{node}]", f"train.steps={stop}", "train.optimizer.schedule=constant"]
        overrides.append(f"output_dir={tmp_path / name}")
        trainer = Trainer(Recipe.load(path, overrides), resume="auto")
        skipped.append(trainer.measures.data.skipped)
        trainer.fit()
        skipped.append(trainer.measures.data.skipped)
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses.append({line["step"]: line["loss"] for line in lines})
    assert losses[2] == losses[0] and len(losses[0]) == 6
    assert skipped[4] == skipped[3] > skipped[2] == (0,) and skipped[5] == skipped[1] > skipped[3]
