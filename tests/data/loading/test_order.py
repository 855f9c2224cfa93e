import time
from collections import Counter
from itertools import groupby, islice

import pytest

from omnitrain.data.loading.order import SampleOrder


def test_each_source_is_drawn_by_its_weight_exactly() -> None:
    draws = list(islice(SampleOrder([10, 10, 10], [1.0, 2.0, 5.0], seed=0).draws(), 800))
    assert Counter(source for _, source, _ in draws) == {0: 100, 1: 200, 2: 500}
    for end in range(1, 800):
        share = sum(source == 2 for _, source, _ in draws[:end])
        assert abs(share - end * 5 / 8) <= 1


def test_an_epoch_shows_every_row_once_and_the_next_in_another_order() -> None:
    rows = [row for _, _, row in islice(SampleOrder([50], [1.0], seed=3).draws(), 100)]
    assert sorted(rows[:50]) == sorted(rows[50:]) == list(range(50))
    assert rows[:50] != rows[50:]


def test_the_order_is_a_function_of_the_seed() -> None:
    first, again, other = (list(islice(SampleOrder([20, 30], [1, 3], seed).draws(), 200)) for seed in (1, 1, 2))
    assert first == again and first != other


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0], [0.1, 0.2, 0.7], [1.0] * 20 + [100.0], [1e-6, 1.0]])
def test_the_order_can_be_entered_anywhere(weights: list[float]) -> None:
    order = SampleOrder([7 + source for source in range(len(weights))], weights, seed=2)
    whole = list(islice(order.draws(), 600))
    assert [index for index, _, _ in whole] == list(range(600))
    for start in (0, 1, 2, 99, 100, 101, 599):
        assert next(order.draws(start)) == order[start] == whole[start]
    assert list(islice(order.draws(300), 300)) == whole[300:]


def test_small_sources_do_not_come_in_a_row() -> None:
    drawn = [source for _, source, _ in islice(SampleOrder([9] * 21, [1.0] * 20 + [100.0], seed=0).draws(), 1200)]
    runs = [len(list(run)) for is_small, run in groupby(drawn, lambda source: source < 20) if is_small]
    assert max(runs) == 1


def test_resuming_after_a_million_steps_takes_a_moment() -> None:
    order = SampleOrder([1000, 300, 50_000], [1.0, 0.3, 2.2], seed=0)
    started = time.perf_counter()
    held = [order[index] for index in range(10**8 - 64, 10**8)]
    assert [index for index, _, _ in [*held, *islice(order.draws(10**8), 1)]] == list(range(10**8 - 64, 10**8 + 1))
    assert time.perf_counter() - started < 0.5
