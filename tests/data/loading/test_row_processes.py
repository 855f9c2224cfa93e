"""Rows that hang or crash, in Python or in C code, cost themselves and the time of their deadline."""

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pytest

from omnitrain.data.loading.loader import LoaderState, StepLoader, build_dataloader
from omnitrain.data.loading.row_processes import PreparedRows, prepare_some
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import Row
from omnitrain.errors import TrainingError
from omnitrain.recipe import Data
from tests.tiny import CHAT, tiny_model, tiny_processor, tiny_row, write_parquet

SECONDS = 2.0  # more than a row needs on a busy machine
ROWS = [tiny_row("image_to_text", i) for i in range(12)]


@pytest.fixture(scope="module")
def processor() -> OmniProcessor:
    return tiny_processor(tiny_model())


def hang_holding_all() -> None:
    """Never return, and let no other thread of this process run: what a decoder's endless loop does."""
    ctypes.PyDLL(None).pause()


def hang_politely() -> None:
    time.sleep(3600)


class Hanging:
    """A processor that hangs on the rows of a file, as it is when a row is drawn. It counts what it prepares there."""

    def __init__(self, processor: OmniProcessor, folder: Path, hang=hang_holding_all) -> None:
        self.processor, self.folder, self.hang = processor, folder, hang

    def hang_on(self, *ids: str) -> None:
        (self.folder / "hang").write_text("\n".join(ids))

    def require_deadlines(self, number: int) -> None:
        """Each row hung under the kernel's timer, which ends its process at the deadline, however busy the machine."""
        left = [float(line) for line in (self.folder / "left").read_text().splitlines()]
        assert len(left) >= number and all(0 < seconds <= SECONDS for seconds in left)

    @property
    def tried(self) -> list[str]:
        log = self.folder / "tried"
        return log.read_text().splitlines() if log.exists() else []

    def sample(self, row: Row, **options: object) -> Sample | Rejected:
        with open(self.folder / "tried", "a") as log:
            log.write(f"{row.id}\n")
        if row.id in (self.folder / "hang").read_text().splitlines():
            with open(self.folder / "left", "a") as log:
                log.write(f"{signal.getitimer(signal.ITIMER_REAL)[0]}\n")
            self.hang()
        return self.processor.sample(row, **options)


def data(folder: Path, rows: Sequence[Row] = ROWS, **settings: object) -> Data:
    source = {"path": str(write_parquet(folder / "rows.parquet", rows)), "sample_seconds": SECONDS}
    defaults = {"chat": CHAT, "pack_tokens": 160, "packing_buffer": 2, "workers": 0}
    return Data.model_validate({"train": [source], **defaults, **settings})


def ids_of(packs: list[Pack]) -> list[str]:
    return [name for pack in packs for name in pack.info.ids]


def take(loader: StepLoader, number: int) -> tuple[list[Pack], list[LoaderState]]:
    """Return packs, and the state after each."""
    taken = [(pack, loader.state()) for (pack,) in islice(loader, number)]
    return [pack for pack, _ in taken], [state for _, state in taken]


@pytest.mark.parametrize(("workers", "hang"), [(0, hang_holding_all), (1, hang_politely), (3, hang_holding_all)])
def test_a_row_that_hangs_is_rejected_at_its_deadline(
    processor: OmniProcessor, tmp_path: Path, workers: int, hang: Callable[[], None]
) -> None:
    slow = Hanging(processor, tmp_path, hang)
    slow.hang_on("image_to_text/3")
    loader = build_dataloader(data(tmp_path, workers=workers), slow, alone=True)
    packs, _ = take(loader, 11)
    assert sorted(ids_of(packs)) == sorted(f"image_to_text/{i}" for i in range(12) if i != 3)
    slow.require_deadlines(1)
    assert {row.id: row.reason for row in loader.rejected.values()} == {
        "image_to_text/3": "not ready within 2 s (sample_seconds)"
    }
    assert {row.source for row in loader.rejected.values()} == {"image_to_text"}


@pytest.mark.second
def test_what_was_late_is_rejected_again_by_a_resumed_run_in_which_it_would_be_fast(
    processor: OmniProcessor, tmp_path: Path
) -> None:
    """In all epochs, and without another try."""
    slow = Hanging(processor, tmp_path)
    slow.hang_on("image_to_text/3", "image_to_text/7")
    whole, states = take(build_dataloader(data(tmp_path), slow, alone=True), 35)
    assert len(states[14].slots[0].fatal) == 2
    assert not {"image_to_text/3", "image_to_text/7"} & set(ids_of(whole))
    assert slow.tried.count("image_to_text/3") == slow.tried.count("image_to_text/7") == 1
    assert states[34].slots[0].rejected == {"image_to_text": 2}

    slow.hang_on()
    saved = LoaderState.from_saved(asdict(states[14]))
    packs, after = take(build_dataloader(data(tmp_path, workers=3), slow, alone=True, state=saved), 20)
    assert ids_of(packs) == ids_of(whole[15:])
    assert after[-1].slots == states[34].slots


def test_corrupt_and_endless_rows_are_all_listed_and_stall_no_longer_than_the_deadline(
    processor: OmniProcessor, tmp_path: Path
) -> None:
    """5 % corrupt and 1 % endless."""
    rows = [tiny_row("image_to_text", i) for i in range(100)]
    for i in range(7, 100, 20):
        rows[i].media["image"] = [b"broken"]
    corrupt = {row.id for row in rows if row.media["image"] == [b"broken"]}
    endless = {rows[11].id}
    slow = Hanging(processor, tmp_path)
    slow.hang_on(*endless)
    settings = data(tmp_path, rows, workers=2)
    loader = build_dataloader(settings, slow, alone=True)
    packs, _ = take(loader, 94)
    assert sorted(ids_of(packs)) == sorted({row.id for row in rows} - corrupt - endless)
    reasons = {row.id: row.reason for row in loader.rejected.values()}
    assert {name for name, reason in reasons.items() if "unreadable image of 6 bytes" in reason} == corrupt
    assert {name for name, reason in reasons.items() if "not ready within 2 s" in reason} == endless
    assert len(reasons) == 6
    slow.require_deadlines(1)


def crash() -> None:
    faulthandler.disable()  # pytest's would print the stack
    signal.raise_signal(signal.SIGSEGV)


def test_a_decoder_that_crashes_costs_its_row(processor: OmniProcessor, tmp_path: Path) -> None:
    slow = Hanging(processor, tmp_path, crash)
    slow.hang_on("image_to_text/3")
    loader = build_dataloader(data(tmp_path, workers=1), slow, alone=True)
    take(loader, 11)
    assert [(row.id, row.reason) for row in loader.rejected.values()] == [
        ("image_to_text/3", "its decoder crashed (SIGSEGV)")
    ]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGALRM])
def test_a_process_that_ended_between_two_rows_is_named(processor: OmniProcessor, tmp_path: Path, number) -> None:
    loader = build_dataloader(data(tmp_path), processor, alone=True)
    with contextlib.closing(iter(loader)) as steps:
        next(steps)
        (process,) = (child for child in multiprocessing.active_children() if child.name == "rows")
        os.kill(process.pid, number)
        process.join()
        with pytest.raises(TrainingError, match=f"a process that prepares rows ended with exit code -{number:d} "):
            next(steps)


def leave_open(settings: Data, processor: OmniProcessor) -> None:
    global left_open
    left_open = iter(build_dataloader(settings, processor, alone=True))
    next(left_open)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_nobody_closed_does_not_keep_its_process_from_ending(
    processor: OmniProcessor, tmp_path: Path, workers: int
) -> None:
    user = multiprocessing.Process(target=leave_open, args=(data(tmp_path, workers=workers), processor))
    user.start()
    user.join(timeout=30)
    code = user.exitcode
    user.kill()
    assert code == 0


def test_a_row_may_have_long_names_in_any_script(processor: OmniProcessor) -> None:
    source = SlowSource([dataclasses.replace(ROWS[0], id="\U0001f600" * 1000, source="\U0001f600" * 1000)], seconds=0)
    (prepared,) = prepare_some(PreparedRows([source], processor), [(0, 0, 0)])
    assert isinstance(prepared, Sample)


class SlowSource(list[Row]):
    """Rows that take longer to be read than they may take to become samples."""

    sample_seconds = 1.0
    shown = True

    def __init__(self, rows: Sequence[Row], seconds: float = 1.2) -> None:
        super().__init__(rows)
        self.seconds = seconds

    def __getitem__(self, position: int) -> Row:
        time.sleep(self.seconds)
        return super().__getitem__(position)


def test_the_time_of_a_row_begins_when_it_has_been_read(processor: OmniProcessor) -> None:
    """A stream may have to skip many before it."""
    (prepared,) = prepare_some(PreparedRows([SlowSource(ROWS[:1])], processor), [(0, 0, 0)])
    assert isinstance(prepared, Sample)


def fail(row: Row) -> None:
    raise ZeroDivisionError("zero")


def test_an_error_of_our_own_has_its_traceback(processor: OmniProcessor, tmp_path: Path) -> None:
    slow = Hanging(processor, tmp_path, functools.partial(fail, None))
    slow.hang_on("image_to_text/3")
    with pytest.raises(TrainingError, match=r"(?s)in a process that prepares rows:\nTraceback.*ZeroDivisionError"):
        take(build_dataloader(data(tmp_path), slow, alone=True), 12)


def test_texts_need_no_process_of_their_own(processor: OmniProcessor, tmp_path: Path) -> None:
    settings = data(tmp_path, [tiny_row("text", i) for i in range(4)])
    assert not build_dataloader(settings, processor).rows.may_hang
    settings = data(tmp_path)
    assert build_dataloader(settings, processor).rows.may_hang
    settings.train[0].sample_seconds = None
    assert not build_dataloader(settings, processor).rows.may_hang
