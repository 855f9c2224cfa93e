"""A run that stops at step 4 of 9 goes on with the same samples, whatever its source, ranks and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest

from omnitrain.data.loading.loader import StepLoader, build_dataloader
from omnitrain.data.loading.slots import LoaderState, merge_states
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources import documents
from omnitrain.recipe import Data
from tests.covering import pairs
from tests.data.http_server import serving
from tests.data.loading.interrupted import HUB_ID, KINDS, Case, data_of, each_value, hub_data_set, possible, table
from tests.tiny import CHAT, tiny_model, tiny_processor, tiny_row

STOP, STEPS = 4, 9
CACHED = {"cached_samples": 200}  # rows are prepared once in each process
DEFAULT = [*each_value()]


class Seen(NamedTuple):
    """A sample, or a piece of one, that a step trains."""

    index: int
    id: str
    tokens: tuple[int, ...]


@cache
def processor() -> OmniProcessor:
    return tiny_processor(tiny_model())


@cache
def idle() -> Sample:
    sample = processor().sample(tiny_row("text", 0), index=-1)
    assert isinstance(sample, Sample)
    return replace(sample, loss_mask=sample.loss_mask & False)


class Runs:
    """Runs over sources that are written when they are first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.uncut, self._node = cache(self._uncut), cache(self._write)

    def _write(self, kind: str) -> dict[str, Any]:
        (rows := self._folder / kind).mkdir()
        return KINDS[kind](rows)

    def loaders(self, case: Case, ranks: str, workers: str, state: LoaderState | None = None) -> list[StepLoader]:
        settings = {"chat": CHAT, "pack_tokens": 48, "packing_buffer": 6, "workers": int(workers)} | CACHED
        data = Data.model_validate(data_of(self._node(case.kind), case.mixture, self._folder) | settings)
        options = {"seed": 5, "state": state, "slots": int(case.slots), "idle": idle()}
        return [build_dataloader(data, processor(), rank=r, ranks=int(ranks), **options) for r in range(int(ranks))]

    def _uncut(self, kind: str, mixture: str, slots: str) -> tuple[list[list[Seen]], LoaderState]:
        """All steps of one rank without processes, and the state after them."""
        (loader,) = self.loaders(Case(kind, mixture, slots, "1", "1", "0", "0"), "1", "0")
        made = steps([loader], STEPS)
        require_each_once(loader, Counter(seen for step in made for seen in step))
        return made, loader.state()


def require_each_once(loader: StepLoader, trained: Counter[Seen]) -> None:
    """Each piece of each drawn row is trained once or waits for a pack, or the row is rejected.

    And a row is drawn once in an epoch.
    """
    slots, drawn, expected = loader.state().slots, Counter[tuple[int, int]](), Counter[Seen]()
    for slot, state in slots.items():
        for index in range(slot, state.next_index, len(slots)):
            draw = loader.order.draw(index, state.begun)
            drawn[draw[1:]] += 1
            sample = loader.rows[draw]
            if isinstance(sample, Rejected):
                assert sample.id in loader.rejected
                continue
            waiting = state.held_pieces.get(index, range(sample.num_pieces) if index in state.held else ())
            for piece in sample.pieces:
                expected[Seen(index, piece.id, tuple(piece.input_ids.tolist()))] += piece.piece not in waiting
    assert trained == +expected
    for (source, _), times in drawn.items():
        of_source = sum(count for (other, _), count in drawn.items() if other == source)
        assert times <= -(-of_source // loader.order.lengths[source])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder, load = tmp_path_factory.mktemp("runs"), datasets.load_dataset
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_ROW_BYTES", 400)  # so that a text is several rows
        patch.setattr(documents, "_SEARCHED", 40)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        patch.setattr(
            datasets,
            "load_dataset",
            lambda path, **options: hub_data_set(path, **options) if path == HUB_ID else load(path, **options),
        )
        with serving():
            yield Runs(folder)


def steps(loaders: list[StepLoader], number: int) -> list[list[Seen]]:
    """The samples of each step, whichever rank has them. The loaders are then closed in the middle of their work."""
    streams = [iter(loader) for loader in loaders]
    try:
        made = [[pack for stream in streams for pack in next(stream)] for _ in range(number)]
    finally:
        for stream in streams:
            stream.close()
    return [sorted(sample for pack in packs for sample in samples_of(pack) if sample.index >= 0) for packs in made]


def samples_of(pack: Pack) -> Iterator[Seen]:
    tokens = pack.input_ids[0].split(pack.info.lengths)
    for index, name, ids in zip(pack.info.indices, pack.info.ids, tokens, strict=True):
        yield Seen(index, name, tuple(ids.tolist()))


def require_the_same_samples(runs: Runs, case: Case) -> None:
    before = runs.loaders(case, case.ranks_before, case.workers_before)
    begun = steps(before, STOP)
    state = LoaderState.from_saved(asdict(merge_states([loader.state() for loader in before])))
    after = runs.loaders(case, case.ranks_after, case.workers_after, state)
    uncut, end = runs.uncut(case.kind, case.mixture, case.slots)
    assert begun + steps(after, STEPS - STOP) == uncut
    ended = merge_states([loader.state() for loader in after])
    assert ended.slots == end.slots and {row.id for row in ended.rejected} == {row.id for row in end.rejected}


def test_the_table_has_every_pair_of_values() -> None:
    assert len(table()) <= 120
    assert set().union(*map(pairs, table())) == set().union(*map(pairs, possible()))


def test_the_default_rows_have_each_value_of_the_table() -> None:
    assert set().union(*map(enumerate, DEFAULT)) == set().union(*map(enumerate, possible()))


@pytest.mark.parametrize("case", DEFAULT, ids="-".join)
def test_a_run_of_each_kind_goes_on_with_the_same_samples(runs: Runs, case: Case) -> None:
    require_the_same_samples(runs, case)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_every_pair_go_on_with_the_same_samples(runs: Runs, kind: str) -> None:
    for case in table():
        if case.kind == kind and case not in DEFAULT:
            require_the_same_samples(runs, case)
