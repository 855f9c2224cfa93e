"""Small data sets: within an epoch each row is trained once, whatever waits in the packing buffer."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import islice, pairwise

import pytest

from omnitrain.data.loading.loader import LoaderOptions, StepLoader
from omnitrain.data.loading.slots import LoaderState, merge_states
from omnitrain.recipe import Data
from tests.data.loading.test_slots import IDLE, Ready, text

BUFFER = 64  # the default of `data.packing_buffer`


def loader(
    lengths: dict[str, list[int]],
    slots: int = 1,
    rank: int = 0,
    ranks: int = 1,
    state: LoaderState | None = None,
    pack_tokens: int = 400,
) -> StepLoader:
    node = {"train": [{"path": name} for name in lengths], "pack_tokens": pack_tokens, "packing_buffer": BUFFER}
    rows = [[text(f"{name} {i}", length) for i, length in enumerate(of_rows)] for name, of_rows in lengths.items()]
    data = Data.model_validate(node | {"workers": 0})
    options = LoaderOptions(seed=3, slots=slots, rank=rank, ranks=ranks, state=state, idle=IDLE)
    return StepLoader(rows, Ready(), data, options)


def ids_of(packs: tuple) -> list[str]:
    return [name for pack in packs for name in pack.info.ids if name != "idle"]


def steps_of(loaders: list[StepLoader], number: int) -> list[list[str]]:
    streams = [iter(each) for each in loaders]
    return [sorted(name for stream in streams for name in ids_of(next(stream))) for _ in range(number)]


FIFTY = {"rows": [3 + (7 * i) % 37 for i in range(50)]}  # 3 to 39 tokens


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("pack_tokens", [60, 400, 4096])  # some rows, some ten, all of them
def test_each_row_is_trained_once_before_any_row_is_trained_again(slots: int, pack_tokens: int) -> None:
    trained: list[list[str]] = [[] for _ in range(slots)]
    for packs in islice(iter(loader(FIFTY, slots, pack_tokens=pack_tokens)), 90):
        for slot, pack in enumerate(packs):
            assert len(set(pack.info.ids)) == len(pack.info.ids)  # no row twice in a pack
            trained[slot] += pack.info.ids
    epochs = range(min(len(ids) // len(range(slot, 50, slots)) for slot, ids in enumerate(trained)) - 1)
    assert len(epochs) >= 2
    for epoch in epochs:
        seen = Counter[str]()
        for slot, ids in enumerate(trained):
            drawn = [len(range((slot - 50 * one) % slots, 50, slots)) for one in range(epoch + 1)]
            seen.update(ids[sum(drawn[:-1]) : sum(drawn)])
        assert seen == Counter(f"rows {i}" for i in range(50))


def test_an_epoch_ends_in_one_pack_that_is_not_full() -> None:
    sizes = [packs[0].num_tokens for packs in islice(iter(loader(FIFTY)), 9)]
    assert sum(FIFTY["rows"]) == sum(sizes[:3]) == sum(sizes[3:6]) == sum(sizes[6:])
    assert all(min(full) >= 390 for full in (sizes[:2], sizes[3:5], sizes[6:8]))


def test_epochs_of_each_source_follow_each_other_in_a_mixture() -> None:
    one = loader({"few": [20] * 7, "many": [30] * 90})
    packs = [list(ids_of(made)) for made in islice(iter(one), 40)]
    for source, rows in (("few", 7), ("many", 90)):
        counts = Counter[str]()
        for ids in packs:
            counts.update(name for name in ids if name.startswith(source))
            passes = [counts[f"{source} {i}"] for i in range(rows)]
            assert max(passes) - min(passes) <= 1
        assert max(counts.values()) >= 2
    assert max(Counter(ids).most_common(1)[0][1] for ids in packs) == 1


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 4)])
def test_a_run_stopped_among_epochs_goes_on_with_the_same_samples_on_other_ranks(before: int, after: int) -> None:
    uncut = steps_of([loader(FIFTY, 3)], 12)
    first = [loader(FIFTY, 3, rank, before) for rank in range(before)]
    begun = steps_of(first, 5)
    state = LoaderState.from_saved(asdict(merge_states([each.state() for each in first])))
    assert begun + steps_of([loader(FIFTY, 3, rank, after, state) for rank in range(after)], 7) == uncut


def test_an_order_knows_the_epoch_of_each_draw() -> None:
    order = loader({"few": [20] * 7, "many": [30] * 90}, 2).order
    drawn, epochs = (list(islice(draws(1), 300)) for draws in (order.draws, order.epochs))
    assert [draw[:2] for draw in drawn] == [epoch[:2] for epoch in epochs]
    for source, rows in enumerate((7, 90)):
        of_source = [epoch for _, number, epoch in epochs if number == source]
        assert all(0 <= later - earlier <= 1 for earlier, later in pairwise(of_source))
        assert of_source == [(2 * count + 1) // rows for count in range(len(of_source))]
