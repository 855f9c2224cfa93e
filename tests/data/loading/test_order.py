import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, islice

import numpy as np
import pytest

from omnitrain.data.loading.order import SampleOrder, SourceShare, shuffled, shuffled_in_blocks


def order_of(lengths: Sequence[int], weights: Sequence[float], seed: int, slots: int = 1) -> SampleOrder:
    shares = zip(lengths, weights, strict=True)
    return SampleOrder([SourceShare(str(i), n, (weight,)) for i, (n, weight) in enumerate(shares)], seed, slots)


def test_each_source_is_drawn_by_its_weight_exactly() -> None:
    draws = list(islice(order_of([10, 10, 10], [1.0, 2.0, 5.0], seed=0).draws(), 800))
    assert Counter(source for _, source, _ in draws) == {0: 100, 1: 200, 2: 500}
    for end in range(1, 800):
        share = sum(source == 2 for _, source, _ in draws[:end])
        assert abs(share - end * 5 / 8) <= 1


def test_an_epoch_shows_every_row_once_and_the_next_in_another_order() -> None:
    rows = [row for _, _, row in islice(order_of([50], [1.0], seed=3).draws(), 100)]
    assert sorted(rows[:50]) == sorted(rows[50:]) == list(range(50))
    assert rows[:50] != rows[50:]


def test_the_order_is_a_function_of_the_seed() -> None:
    first, again, other = (list(islice(order_of([20, 30], [1, 3], seed).draws(), 200)) for seed in (1, 1, 2))
    assert first == again and first != other


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0], [0.1, 0.2, 0.7], [1.0] * 20 + [100.0], [1e-6, 1.0]])
def test_the_order_can_be_entered_anywhere(weights: list[float], slots: int) -> None:
    order = order_of([70 + source for source in range(len(weights))], weights, 2, slots)
    for slot in range(slots):
        whole = list(islice(order.draws(slot), 600))
        assert [index for index, _, _ in whole] == list(range(slot, 600 * slots, slots))
        for start in (0, 1, 2, 99, 100, 101, 599):
            index = slot + start * slots
            assert next(order.draws(index)) == order.draw(index) == whole[start]
        assert list(islice(order.draws(slot + 300 * slots), 300)) == whole[300:]


def test_small_sources_do_not_come_in_a_row() -> None:
    drawn = [source for _, source, _ in islice(order_of([9] * 21, [1.0] * 20 + [100.0], seed=0).draws(), 1200)]
    runs = [len(list(run)) for is_small, run in groupby(drawn, lambda source: source < 20) if is_small]
    assert max(runs) == 1


def test_resuming_after_a_million_steps_takes_a_moment() -> None:
    order = order_of([1000, 300, 50_000], [1.0, 0.3, 2.2], seed=0)
    started = time.perf_counter()
    held = [order.draw(index) for index in range(10**8 - 64, 10**8)]
    assert [index for index, _, _ in [*held, *islice(order.draws(10**8), 1)]] == list(range(10**8 - 64, 10**8 + 1))
    assert time.perf_counter() - started < 0.5


def test_slots_draw_no_row_twice_in_an_epoch() -> None:
    order = order_of([40, 24], [5.0, 3.0], seed=1, slots=4)
    drawn = Counter(draw[1:] for slot in range(4) for draw in islice(order.draws(slot), 16))
    assert set(drawn.values()) == {1} and len(drawn) == 64


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 1000, 65_537])
def test_a_shuffle_is_a_permutation(length: int) -> None:
    rows = [shuffled(np.arange(length), length, key) for key in ("a", "b")]
    assert all(np.array_equal(np.sort(one), np.arange(length)) for one in rows)
    if length > 5:
        assert (rows[0] == rows[1]).mean() < 0.5
    backwards = shuffled(np.arange(length)[::-1], length, "a")
    assert np.array_equal(backwards[::-1], rows[0])  # a row depends on its position alone


@pytest.mark.parametrize("length", [3, 4, 5])
def test_all_permutations_of_few_rows_are_about_equally_likely(length: int) -> None:
    tries = 30 * math.factorial(length)
    found = Counter(tuple(shuffled(np.arange(length), length, str(key)).tolist()) for key in range(tries))
    assert len(found) == math.factorial(length)
    chi_squared = sum((count - 30) ** 2 / 30 for count in found.values())
    degrees = math.factorial(length) - 1
    assert chi_squared < degrees + 5 * math.sqrt(2 * degrees)


def test_neighbours_of_a_large_source_land_anywhere() -> None:
    rows = shuffled(np.arange(20_000), 10**9, "seed")
    assert len(np.unique(rows)) == 20_000
    share, _ = np.histogram(rows, bins=10, range=(0, 10**9))
    assert abs(share - 2000).max() < 5 * math.sqrt(2000)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.04


@pytest.mark.parametrize("blocks", [[10], [3, 1, 7, 7, 2, 9, 30, 4, 4, 4, 1]])
def test_a_shuffle_in_blocks_has_few_of_them_in_use_at_a_time(blocks: list[int]) -> None:
    rows = shuffled_in_blocks(np.arange(sum(blocks)), blocks, "seed")
    assert sorted(rows.tolist()) == list(range(sum(blocks)))
    block_of = np.repeat(np.arange(len(blocks)), blocks)[rows]
    last = {block: place for place, block in enumerate(block_of.tolist())}
    first = {block: place for place, block in reversed(list(enumerate(block_of.tolist())))}
    in_use = [sum(first[block] <= place <= last[block] for block in first) for place in range(len(rows))]
    assert max(in_use) <= 4
    assert np.array_equal(shuffled_in_blocks(np.array([5, 2]), blocks, "seed"), rows[[5, 2]])


def test_a_new_source_leaves_the_order_within_the_others() -> None:
    a, b, c = (SourceShare(name, length, (2.0,)) for name, length in (("a", 30), ("b", 20), ("c", 11)))

    def rows(name: str, *sources: SourceShare) -> list[int]:
        drawn = islice(SampleOrder(sources, seed=4).draws(), 200)
        return [row for _, source, row in drawn if sources[source].name == name][:40]

    assert rows("a", a, b) == rows("a", c, b, a) == rows("a", a)
    assert rows("b", a, b) == rows("b", c, a, b)


def test_epochs_end_a_source_and_the_others_share_its_draws() -> None:
    a, b = SourceShare("a", 10, (1.0,), epochs=2.5), SourceShare("b", 40, (1.0,), epochs=3)
    order = SampleOrder([a, b], seed=0, slots=3)
    drawn = [list(order.draws(slot)) for slot in range(3)]
    times = Counter(draw[1:] for slot in drawn for draw in slot)
    of_a = Counter(count for (source, _), count in times.items() if source == 0)
    assert of_a == {3: 5, 2: 5} and {count for (source, _), count in times.items() if source == 1} == {3}
    assert {source for slot in drawn for _, source, _ in slot[20:]} == {1}
    for slot, draws in enumerate(drawn):
        assert [order.draw(index) for index, _, _ in draws[::7]] == draws[::7]
        with pytest.raises(IndexError, match="the sources end"):
            order.draw(slot + 3 * len(draws))


def test_a_stage_goes_on_with_the_rows_that_the_one_before_left() -> None:
    weights = {"a": (1.0, 3.0), "b": (1.0, 1.0), "c": (0.0, 4.0)}
    order = SampleOrder([SourceShare(name, 60, both) for name, both in weights.items()], 5, 2, stage_steps=[3])
    assert [order.stage_of(step) for step in (0, 2, 3, 9)] == [0, 0, 1, 1]
    begun = {0: (40,), 1: (61,)}
    drawn = {slot: list(islice(order.draws(slot, begun[slot]), 60)) for slot in (0, 1)}
    for slot, (border,) in begun.items():
        before = Counter(source for index, source, _ in drawn[slot] if index < border)
        after = Counter(source for index, source, _ in drawn[slot] if index >= border)
        assert abs(before[0] - before[1]) <= 1 and before[2] == 0
        total = sum(after.values())
        assert all(abs(after[source] - total * share) <= 1 for source, share in enumerate((3 / 8, 1 / 8, 4 / 8)))
        assert all(order.draw(draw[0], (border,)) == draw for draw in drawn[slot])
    of_one_epoch = Counter(draw[1:] for slot in drawn.values() for draw in slot)
    assert max(of_one_epoch.values()) == 1


def draws_per_second() -> float:
    order = order_of([10**9], [1.0], seed=0, slots=8)
    started = time.process_time()
    assert sum(1 for _ in islice(order.draws(3), 50_000)) == 50_000
    return 50_000 / (time.process_time() - started)


def test_a_billion_rows_are_drawn_fast_and_in_no_memory() -> None:
    assert any(draws_per_second() > 200_000 for _ in range(3))
    tracemalloc.start()
    try:
        draws = SampleOrder([SourceShare("rows", 10**9)], 0).draws(10**12)
        assert len({row for _, _, row in islice(draws, 5000)}) > 4900
        assert tracemalloc.get_traced_memory()[1] < 20e6  # bytes
    finally:
        tracemalloc.stop()
