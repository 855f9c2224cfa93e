import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from omnitrain.data.loading import packer
from omnitrain.data.loading.loader import StepLoader, build_dataloader
from omnitrain.data.loading.row_processes import SlotRows
from omnitrain.data.packing.budget import PackBudget, fill_pack
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import Row
from omnitrain.errors import DataError, TrainingError, UserError
from omnitrain.recipe import Data
from tests.tiny import CHAT, TASKS, tiny_model, tiny_processor, tiny_row, tiny_samples, write_parquet

Build = Callable[..., object]


@pytest.fixture(scope="module")
def processor() -> OmniProcessor:
    return tiny_processor(tiny_model())


def data(folder: Path, rows: list[Row], **settings: object) -> Data:
    path = write_parquet(folder / "rows.parquet", rows)
    defaults = {"chat": CHAT, "pack_tokens": 160, "packing_buffer": 8, "workers": 0}
    return Data.model_validate({"train": [{"path": str(path)}], **defaults, **settings})


@cache
def row(i: int) -> Row:
    return tiny_row(TASKS[i % len(TASKS)], i)


def rows(count: int = 28) -> list[Row]:
    return [row(i) for i in range(count)]


def first_packs(loader: StepLoader, number: int) -> list[Pack]:
    """Of steps of one pack."""
    return [pack for (pack,) in islice(iter(loader), number)]


def indices(packs: list[Pack]) -> list[tuple[int, ...]]:
    return [tuple(sorted(pack.info.indices)) for pack in packs]


def test_every_sample_is_packed_once_and_packs_are_dense(processor: OmniProcessor, tmp_path: Path) -> None:
    packs = first_packs(build_dataloader(data(tmp_path, rows()), processor), 20)
    seen = [index for pack in packs for index in pack.info.indices]
    assert len(seen) == len(set(seen))
    assert set(range(max(seen) - 24)) <= set(seen)  # nobody waits for ever
    assert all(pack.num_tokens <= 160 for pack in packs)
    assert sum(pack.num_tokens for pack in packs) / (160 * len(packs)) > 0.9


def test_a_loader_continues_exactly_where_its_state_says(processor: OmniProcessor, tmp_path: Path) -> None:
    settings = data(tmp_path, rows())
    whole = first_packs(build_dataloader(settings, processor, seed=5), 12)
    first = build_dataloader(settings, processor, seed=5)
    first_packs(first, 7)
    state = first.state()
    assert state.slots[0].held, "the test must cover samples that were drawn and not yet packed"
    rest = first_packs(build_dataloader(settings, processor, seed=5, state=state), 5)
    assert indices(rest) == indices(whole[7:])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_state_is_that_of_the_pack_handed_out_however_far_ahead_the_loader_is(
    processor: OmniProcessor, tmp_path: Path, workers: int
) -> None:
    settings = data(tmp_path, rows(), workers=workers, cached_samples=100)
    loader = build_dataloader(settings, processor, seed=5)
    stream = iter(loader)
    seen = [pack for (pack,) in islice(stream, 7)]
    time.sleep(0.3)
    state = loader.state()
    stream.close()
    drawn = {index for pack in seen for index in pack.info.indices} | set(state.slots[0].held)
    assert drawn == set(range(state.slots[0].next_index))
    rest = first_packs(build_dataloader(settings, processor, seed=5, state=state), 3)
    assert indices(rest) == indices(first_packs(build_dataloader(settings, processor, seed=5), 10)[7:])


def test_kept_samples_are_the_same_samples(processor: OmniProcessor, tmp_path: Path) -> None:
    plain, kept = (
        first_packs(build_dataloader(data(tmp_path, rows(7), cached_samples=n), processor), 12) for n in (0, 7)
    )
    assert indices(plain) == indices(kept)
    assert all((a.input_ids == b.input_ids).all() for a, b in zip(plain, kept, strict=True))


def test_samples_without_tails_are_a_token_shorter_and_predict_the_same(
    processor: OmniProcessor, tmp_path: Path
) -> None:
    settings = data(tmp_path, rows(7))
    whole, cut = (
        first_packs(build_dataloader(settings, processor, alone=True, without_tails=without), 7)
        for without in (False, True)
    )
    assert indices(cut) == indices(whole)
    for one, other in zip(whole, cut, strict=True):
        assert other.num_tokens == one.num_tokens - 1
        assert other.text_rows.equal(one.text_rows) and other.text_labels.equal(one.text_labels)


def test_a_sample_that_fits_without_its_tail_is_no_overlong_one(processor: OmniProcessor, tmp_path: Path) -> None:
    fits = len(tiny_samples(processor, 1)[0]) - 1
    settings = data(tmp_path, [tiny_row(TASKS[0], 0)], pack_tokens=fits, overlong="error")
    (pack,) = first_packs(build_dataloader(settings, processor, without_tails=True), 1)
    assert pack.num_tokens == fits
    with pytest.raises(DataError, match=f"{fits + 1} tokens, but a pack holds at most {fits}"):
        first_packs(build_dataloader(settings, processor), 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(processor: OmniProcessor, tmp_path: Path, workers: int) -> None:
    alone = first_packs(build_dataloader(data(tmp_path, rows()), processor), 6)
    helped = first_packs(build_dataloader(data(tmp_path, rows(), workers=workers), processor), 6)
    assert indices(alone) == indices(helped)
    assert all((a.input_ids == b.input_ids).all() for a, b in zip(alone, helped, strict=True))


def test_a_killed_worker_is_one_clear_error(processor: OmniProcessor, tmp_path: Path) -> None:
    packs = iter(build_dataloader(data(tmp_path, rows(), workers=1), processor))
    next(packs)
    (worker,) = [process for process in multiprocessing.active_children() if process.name == "run_ahead"]
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(TrainingError, match="the data process ended with exit code -9"):
        list(packs)


def children(pid: int) -> list[int]:
    """Process ids, from Linux's /proc."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_killed_helper_is_one_clear_error_and_leaves_no_process(processor: OmniProcessor, tmp_path: Path) -> None:
    packs = iter(build_dataloader(data(tmp_path, rows(), workers=3, pack_tokens=2_000), processor))
    next(packs)
    (packer,) = [process for process in multiprocessing.active_children() if process.name == "run_ahead"]
    helpers = children(packer.pid)
    assert len(helpers) == 2
    time.sleep(1)  # the packer has made all the packs it may, and is in the middle of sending one
    os.kill(helpers[0], signal.SIGKILL)
    with pytest.raises(TrainingError, match=r"^a process that prepares rows ended with exit code -9"):
        list(packs)
    time.sleep(0.5)
    assert not any(is_running(pid) for pid in (packer.pid, *helpers))


def test_a_loader_can_travel_to_a_process_that_shares_no_memory(processor: OmniProcessor, tmp_path: Path) -> None:
    loader = build_dataloader(data(tmp_path, rows()), processor)
    there = pickle.loads(pickle.dumps(loader))
    assert next(iter(there))[0].info == next(iter(loader))[0].info


def test_damaged_files_are_skipped_counted_listed_and_the_rest_keeps_its_order(
    processor: OmniProcessor, tmp_path: Path
) -> None:
    good = rows(28)
    damaged = list(good)
    damaged[1] = Row(**{**vars(good[1]), "media": {"image": [b"no image"], "audio": [], "video": []}})
    damaged[2] = Row(**{**vars(good[2]), "media": {"image": [], "audio": [b"RIFFno sound"], "video": []}})
    damaged[3] = Row(**{**vars(good[3]), "media": {"image": [], "audio": [], "video": [b"no video"]}})
    (tmp_path / "bad").mkdir()
    clean = build_dataloader(data(tmp_path, good), processor, seed=1, alone=True)
    dirty = build_dataloader(data(tmp_path / "bad", damaged), processor, seed=1, alone=True)
    bad = {good[i].id for i in (1, 2, 3)}
    kept = [name for pack in first_packs(clean, 56) for name in pack.info.ids if name not in bad]
    assert [name for pack in first_packs(dirty, 50) for name in pack.info.ids] == kept
    assert set(clean.rejected) == set() and set(dirty.rejected) == bad
    reasons = {row.source: row.reason for row in dirty.rejected.values()}
    assert "unreadable image of 8 bytes" in reasons["image_to_text"]
    assert "unreadable audio of 12 bytes" in reasons["speech_to_text"]
    assert "unreadable video of 8 bytes" in reasons["video_to_text"]


def test_overlong_samples_are_dropped_or_refused_as_asked(processor: OmniProcessor, tmp_path: Path) -> None:
    long = tiny_row("text", 0)
    long.messages[0]["content"][0]["text"] = "y" * 200
    settings = data(tmp_path, [*rows(7), long])
    loader = build_dataloader(settings, processor)
    first_packs(loader, 5)
    assert list(loader.rejected) == [long.id] and "at most 160" in loader.rejected[long.id].reason
    strict = build_dataloader(settings.model_copy(update={"overlong": "error"}), processor)
    with pytest.raises(DataError, match=r"raise the limit"):
        first_packs(strict, 5)


@pytest.mark.parametrize("name", ["b{}", "same"])
def test_a_data_set_of_nothing_but_damage_ends_with_an_error(
    processor: OmniProcessor, tmp_path: Path, name: str
) -> None:
    bad = [
        Row(
            name.format(i),
            "image_to_text",
            tiny_row("image_to_text", i).messages,
            {"image": [b"x"], "audio": [], "video": []},
            {},
        )
        for i in range(4)
    ]
    with pytest.raises(DataError, match="all of 4 rows were rejected"):
        next(iter(build_dataloader(data(tmp_path, bad), processor)))


def test_hopeless_data_are_given_up_long_before_they_end(
    processor: OmniProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "_MAX_FAILURES", 100)  # in place of 1000
    lots = [tiny_row("text", i) for i in range(150)]
    loader = build_dataloader(data(tmp_path, lots, pack_tokens=1), processor)
    with pytest.raises(DataError, match=r"all of 100 rows were rejected; the last, .* a pack holds at most 1"):
        next(iter(loader))


class CountingProcessor:
    """Counts the rows that it is given, in any process."""

    def __init__(self, processor: OmniProcessor) -> None:
        self.processor, self.count = processor, multiprocessing.Value("i")

    def sample(self, row: Row, **options: object) -> Sample | Rejected:
        with self.count.get_lock():
            self.count.value += 1
        return self.processor.sample(row, **options)


def test_helpers_hold_no_more_rows_than_they_must(processor: OmniProcessor, tmp_path: Path) -> None:
    counting = CountingProcessor(processor)
    loader = build_dataloader(data(tmp_path, rows()), counting)
    with SlotRows(loader.rows, {0: loader.order.draws()}, helpers=2) as samples:
        samples.take(0)
        time.sleep(1)
    assert counting.count.value <= 2 * 4 * 8 + 8  # two helpers, four messages of eight rows each; one more was drawn


@pytest.mark.parametrize("workers", [0, 1])
def test_a_modality_the_model_cannot_read_is_one_clear_error(tmp_path: Path, workers: int) -> None:
    model = tiny_model(encoders={})
    loader = build_dataloader(data(tmp_path, rows(7), workers=workers), tiny_processor(model))
    with pytest.raises(UserError, match=r"asks the model to read .*model\.encoders") as caught:
        next(iter(loader))
    assert "Traceback" not in str(caught.value)


def test_missing_file_and_wrong_column_name_what_is_there(processor: OmniProcessor, tmp_path: Path) -> None:
    path = data(tmp_path, rows(7)).train[0].path
    with pytest.raises(DataError, match=r"did you mean .*rows\.parquet"):
        build_dataloader(Data.model_validate({"train": [{"path": path.replace("rows", "row")}]}), processor)
    wrong = {"train": [{"path": path, "columns": {"messages": "mesages"}}]}
    with pytest.raises(DataError, match=r"column 'mesages'.*is missing, found .*`columns.messages: messages`"):
        build_dataloader(Data.model_validate(wrong), processor)


def test_filling_takes_the_oldest_then_the_longest_that_fit(processor: OmniProcessor) -> None:
    held = tiny_samples(processor, 14)
    chosen = fill_pack(held, PackBudget(90))
    assert chosen[0] is held[0] and sum(map(len, chosen)) <= 90
    left_out = [s for s in held if s not in chosen]
    assert all(len(s) > 90 - sum(map(len, chosen)) for s in left_out)
