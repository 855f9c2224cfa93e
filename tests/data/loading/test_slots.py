import dataclasses
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Collection
from functools import cache, partial
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnitrain.data.loading.loader import LoaderOptions, Packs, StepLoader
from omnitrain.data.loading.order import SampleOrder, SourceShare
from omnitrain.data.loading.row_processes import PreparedRows, SlotRows
from omnitrain.data.loading.slots import (
    LoaderState,
    RankShare,
    SlotState,
    merge_states,
    rejected_by_source,
    share_of_rank,
)
from omnitrain.data.packing.budget import balanced_shares
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.errors import DataError, TrainingError, UserError
from omnitrain.recipe import Data

SLOTS = 4
Content = list[list[tuple[int, ...]]]  # step, slot -> indices of its samples, ascending


def text(name: str, length: int) -> Sample:
    ids = np.arange(length)
    return Sample(name, "text", input_ids=ids, loss_mask=ids > 0, position_ids=ids)


IDLE = dataclasses.replace(text("idle", 2), loss_mask=np.zeros(2, dtype=bool), index=-1)


def texts(count: int = 60) -> list[Sample]:
    lengths = np.random.default_rng(0).integers(3, 40, count)
    return [text(f"row {i}", int(length)) for i, length in enumerate(lengths)]


class Ready:
    """In place of a processor: its rows are samples already, but for those whose id is in ``bad``."""

    def __init__(self, bad: Collection[str] = ()) -> None:
        self.bad = bad

    def sample(self, row: Sample, max_tokens: int | None, **options: bool) -> Sample | Rejected:
        return Rejected(row.id, row.source, "broken") if row.id in self.bad else row


def settings(**changes: Any) -> Data:
    defaults = {"pack_tokens": 100, "packing_buffer": 6, "workers": 0}
    return Data.model_validate({"train": [{"path": "texts"}], **defaults, **changes})


def loader(rank: int = 0, ranks: int = 1, *, bad: Collection[str] = (), **options: Any) -> StepLoader:
    data, rows = options.pop("data", settings()), options.pop("rows", texts())
    options = {"seed": 3, "slots": SLOTS, "idle": IDLE} | options
    return StepLoader([rows], Ready(bad), data, LoaderOptions(rank=rank, ranks=ranks, **options))


def content(loaders: list[StepLoader], steps: int) -> Content:
    """What the ranks draw together, whichever of them draws it; nothing twice."""
    streams = [iter(rank) for rank in loaders]
    made = [[next(stream) for stream in streams] for _ in range(steps)]
    return [merged([pack for packs in step for pack in packs]) for step in made]


def merged(packs: Packs) -> list[tuple[int, ...]]:
    indices = sorted(index for pack in packs for index in pack.info.indices if index >= 0)
    assert len(set(indices)) == len(indices)
    return [tuple(index for index in indices if index % SLOTS == slot) for slot in range(SLOTS)]


def world(ranks: int, **options: Any) -> list[StepLoader]:
    return [loader(rank, ranks, **options) for rank in range(ranks)]


def data_processes() -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child.name == "run_ahead"]


@cache
def of_one_rank() -> Content:
    return content(world(1), 13)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 11])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(ranks: int) -> None:
    assert content(world(ranks), 12) == of_one_rank()[:12]


def test_a_rank_packs_each_of_its_slots_by_itself() -> None:
    for rank in range(2):
        for packs in islice(iter(loader(rank, 2)), 5):
            assert [{index % SLOTS for index in pack.info.indices} for pack in packs] == [{rank}, {rank + 2}]
            assert all(pack.num_tokens <= 100 for pack in packs)


def test_slots_draw_every_index_once() -> None:
    one = loader()
    drawn = [index for step in content([one], 20) for slot in step for index in slot]
    state = one.state()
    waiting = [index for slot in state.slots.values() for index in slot.held]
    assert len(set(drawn + waiting)) == len(drawn + waiting)
    assert {slot: found.next_index % SLOTS for slot, found in state.slots.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    upto = {slot: range(slot, found.next_index, SLOTS) for slot, found in state.slots.items()}
    assert set(drawn + waiting) == {index for indices in upto.values() for index in indices}


@pytest.mark.parametrize("later", [1, 3, 7])
@pytest.mark.parametrize("before", [1, 3, 4, 6])
def test_a_run_continues_on_another_number_of_ranks_with_no_sample_twice_or_missing(before: int, later: int) -> None:
    first = world(before)
    begun = content(first, 7)
    state = merge_states([rank.state() for rank in first])
    assert sorted(state.slots) == list(range(SLOTS)) and any(slot.held for slot in state.slots.values())
    assert begun + content(world(later, state=state), 6) == of_one_rank()


def test_a_rank_continues_from_its_own_state() -> None:
    first = loader(1, 2)
    stream = iter(first)
    list(islice(stream, 3))
    state = first.state()
    assert sorted(state.slots) == [1, 3]
    rest = [[pack.info for pack in packs] for packs in islice(stream, 4)]
    assert [[pack.info for pack in packs] for packs in islice(iter(loader(1, 2, state=state)), 4)] == rest


def test_samples_held_for_a_larger_buffer_are_not_lost_in_a_smaller_one() -> None:
    first = loader(data=settings(packing_buffer=30))
    begun = content([first], 2)
    rest = loader(data=settings(packing_buffer=1), state=first.state())
    drawn = [index for step in begun + content([rest], 1) for slot in step for index in slot]
    drawn += [index for slot in rest.state().slots.values() for index in slot.held]
    drawn_up_to = [range(slot, state.next_index, SLOTS) for slot, state in rest.state().slots.items()]
    assert sorted(drawn) == sorted(index for indices in drawn_up_to for index in indices)


def test_a_state_without_a_ranks_slots_is_refused() -> None:
    first = loader(1, 2)
    next(iter(first))
    with pytest.raises(ValueError, match=r"has slots \[1, 3\], but not 0; merge the states of all ranks"):
        loader(0, 2, state=first.state())


def test_states_of_different_steps_are_not_merged() -> None:
    first, second = loader(0, 8), loader(4, 8)
    next(iter(first))
    with pytest.raises(ValueError, match="slot 0 has the states"):
        merge_states([first.state(), second.state()])


def test_merging_lists_a_rejected_row_once() -> None:
    broken = Rejected("row 1", "text", "broken")
    states = [LoaderState({slot: SlotState(slot)}, (broken,)) for slot in (1, 0)]
    assert merge_states(states) == LoaderState({0: SlotState(0), 1: SlotState(1)}, (broken,))


def test_rejected_rows_of_one_slot_leave_the_others_as_they_are() -> None:
    many = texts(400)
    order = SampleOrder([SourceShare("texts 0", len(many))], seed=3, slots=SLOTS)
    bad = {f"row {row}" for _, _, row in islice(order.draws(2), 8)}  # only slot 2 draws them in the first epoch
    clean, dirty = loader(rows=many), loader(rows=many, bad=bad)
    for before, after in zip(content([clean], 6), content([dirty], 6), strict=True):
        assert [before[slot] == after[slot] for slot in range(SLOTS)] == [True, True, False, True]
    assert max(slot.next_index for slot in dirty.state().slots.values()) < len(many)
    assert set(dirty.rejected) == bad and clean.rejected == {}


def rejected_of(loaders: list[StepLoader]) -> tuple[dict[str, int], list[str]]:
    """The counts of all ranks by source, and the ids that they list together."""
    listed = [row.id for rank in loaders for row in rank.state().rejected]
    return rejected_by_source(rank.num_rejected for rank in loaders), sorted(set(listed))


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_any_number_of_ranks_counts_and_lists_each_rejected_row_once(ranks: int) -> None:
    """Over several epochs, in which every row comes to several slots, and where ranks share a slot."""
    rows = texts()
    for index in range(0, len(rows), 2):
        rows[index] = dataclasses.replace(rows[index], source="speech")
    bad = {f"row {row}" for row in (0, 4, 10, 11)}
    whole = world(ranks, rows=rows, bad=bad)
    content(whole, 40)
    assert max(slot.next_index for rank in whole for slot in rank.state().slots.values()) > 3 * len(rows)
    assert rejected_of(whole) == ({"speech": 3, "text": 1}, sorted(bad))


def test_a_run_that_goes_on_counts_and_lists_on() -> None:
    rows, bad = texts(400), {f"row {row}" for row in range(0, 400, 7)}
    uncut, first = world(1, rows=rows, bad=bad), world(2, rows=rows, bad=bad)
    content(uncut, 9)
    content(first, 5)
    state = merge_states([rank.state() for rank in first])
    begun = {row.id for row in state.rejected}
    rest = world(3, rows=rows, bad=bad, state=dataclasses.replace(state, rejected=()))
    content(rest, 4)
    counts, listed = rejected_of(rest)
    assert begun and listed and (counts, sorted(begun.union(listed))) == rejected_of(uncut)
    resumed = loader(rows=rows, bad=bad, state=state)
    assert resumed.state() == state


@pytest.mark.parametrize("rank", range(4))
def test_nothing_but_damage_ends_every_rank(rank: int) -> None:
    with pytest.raises(DataError, match=r"all of \d+ rows were rejected"):
        next(iter(loader(rank, 4, bad={row.id for row in texts()})))


def test_one_good_row_among_few_is_enough_for_every_slot() -> None:
    few = texts(12)
    steps = islice(iter(loader(rows=few, bad={row.id for row in few[1:]}, data=settings(packing_buffer=1))), 10)
    assert {name for packs in steps for pack in packs for name in pack.info.ids} == {"row 0"}


@pytest.mark.parametrize("workers", [1, 3])
def test_background_processes_change_nothing(workers: int) -> None:
    helped = [loader(rank, 2, data=settings(workers=workers)) for rank in range(2)]
    assert content(helped, 10) == of_one_rank()[:10]
    assert data_processes() == []


def tagged(packs: Packs, folder: Path) -> tuple[int, list[int]]:
    return os.getpid(), [pack.num_tokens for pack in packs]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_follows_on_packing_runs_where_packs_are_made(workers: int, tmp_path: Path) -> None:
    plain = [[pack.num_tokens for pack in packs] for packs in islice(iter(loader()), 3)]
    steps = list(islice(iter(loader(data=settings(workers=workers), then=partial(tagged, folder=tmp_path))), 3))
    assert [tokens for _, tokens in steps] == plain
    (process,) = {pid for pid, _ in steps}
    assert (process == os.getpid()) == (workers == 0)


def refuse(packs: Packs) -> None:
    raise UserError("the topology has no such loss")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_found_after_packing_arrives_as_it_is(workers: int) -> None:
    with pytest.raises(UserError, match=r"^the topology has no such loss$"):
        next(iter(loader(data=settings(workers=workers), then=refuse)))


def test_a_killed_data_process_ends_its_rank_alone_and_leaves_none_behind() -> None:
    killed = iter(loader(0, 2, data=settings(workers=3)))
    next(killed)
    (process,) = data_processes()
    other = iter(loader(1, 2, data=settings(workers=3)))
    next(other)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(TrainingError, match="the data process ended with exit code -9"):
        list(killed)
    assert len(list(islice(other, 5))) == 5
    other.close()
    assert data_processes() == []


def test_shares_hold_every_sample_once_and_are_balanced() -> None:
    for number in (1, 2, 3, 5):
        for count in (1, 4, 17, 60):
            samples = [dataclasses.replace(sample, index=i) for i, sample in enumerate(texts(count))]
            shares = balanced_shares(samples, number)
            assert Counter(sample.index for share in shares for sample in share) == Counter(range(count))
            tokens = [sum(map(len, share)) for share in shares]
            assert max(tokens) - min(tokens) <= max(map(len, samples))


def test_ranks_that_share_a_slot_have_about_as_many_tokens_each() -> None:
    data = settings(pack_tokens=400, packing_buffer=30)
    ranks = [iter(loader(rank, 4, slots=2, data=data)) for rank in range(4)]
    for _ in range(5):
        tokens = [next(rank)[0].num_tokens for rank in ranks]
        assert abs(tokens[0] - tokens[2]) <= 40 and abs(tokens[1] - tokens[3]) <= 40


def test_a_rank_without_samples_gets_the_idle_pack() -> None:
    ranks = [iter(loader(rank, 3, slots=1, alone=True)) for rank in range(3)]
    for packs in zip(*(islice(rank, 4) for rank in ranks), strict=True):
        names = [pack.info.ids for (pack,) in packs]
        assert names.count(("idle",)) == 2
        assert [pack.loss_counts()["text"] for (pack,) in packs if pack.info.ids == ("idle",)] == [0, 0]
    with pytest.raises(ValueError, match="pass `idle`"):
        loader(0, 3, slots=1, idle=None)


@pytest.mark.parametrize(
    ("rank", "ranks", "slots", "share"),
    [
        (0, 1, 3, RankShare((0, 1, 2))),
        (1, 2, 4, RankShare((1, 3))),
        (3, 4, 4, RankShare((3,))),
        (0, 3, 4, RankShare((0, 3))),
        (2, 3, 4, RankShare((2,))),
        (5, 8, 2, RankShare((1,), share=2, num_shares=4)),
        (4, 6, 4, RankShare((0,), share=1, num_shares=2)),
        (2, 6, 4, RankShare((2,))),
    ],
)
def test_ranks_divide_a_step(rank: int, ranks: int, slots: int, share: RankShare) -> None:
    assert share_of_rank(rank, ranks, slots) == share


def test_every_share_of_every_pack_is_of_one_rank_and_ranks_differ_by_one_pack_or_one_share() -> None:
    for ranks in range(1, 9):
        for slots in range(1, 9):
            shares = [share_of_rank(rank, ranks, slots) for rank in range(ranks)]
            parts = sorted((slot, part.share, part.num_shares) for part in shares for slot in part.slots)
            of_slot = Counter(slot for slot, _, _ in parts)
            assert parts == [(slot, share, of_slot[slot]) for slot in range(slots) for share in range(of_slot[slot])]
            for numbers in ([len(part.slots) for part in shares], [part.num_shares for part in shares]):
                assert max(numbers) - min(numbers) <= 1


def test_rows_ahead_stay_bounded_however_unevenly_slots_take() -> None:
    order = SampleOrder([SourceShare("texts", 60)], seed=3, slots=2)
    prepared = PreparedRows([texts()], Ready(), budget=None)
    with SlotRows(prepared, {0: order.draws(0), 1: order.draws(1)}, helpers=1) as rows:
        taken = [rows.take(0).index for _ in range(1500)] + [rows.take(1).index]
        assert taken == [*range(0, 3000, 2), 1]
        assert len(rows._ready[1]) <= 4 * 8  # messages on their way, rows in each


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 3.0], [1.0, 1.0, 1.0, 1.0], [5.0, 2.0, 1.0]])
@pytest.mark.parametrize("slots", [2, 3, 4, 8])
def test_every_slot_sees_every_source_by_its_weight(weights: list[float], slots: int) -> None:
    shares = [SourceShare(str(source), 1000, (weight,)) for source, weight in enumerate(weights)]
    order = SampleOrder(shares, 0, slots)
    for slot in range(slots):
        drawn = Counter(source for _, source, _ in islice(order.draws(slot), 2000))
        for source, weight in enumerate(weights):
            assert drawn[source] / 2000 == pytest.approx(weight / sum(weights), abs=0.05)
