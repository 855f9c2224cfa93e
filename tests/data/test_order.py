from collections import Counter
from itertools import islice

from omnitrain.data.order import SampleOrder


def test_each_source_is_drawn_by_its_weight_exactly() -> None:
    draws = list(islice(SampleOrder([10, 10, 10], [1.0, 2.0, 5.0], seed=0), 800))
    assert Counter(source for _, source, _ in draws) == {0: 100, 1: 200, 2: 500}
    for end in range(1, 800):
        share = sum(source == 2 for _, source, _ in draws[:end])
        assert abs(share - end * 5 / 8) <= 1


def test_an_epoch_shows_every_row_once_and_the_next_in_another_order() -> None:
    rows = [row for _, _, row in islice(SampleOrder([50], [1.0], seed=3), 100)]
    assert sorted(rows[:50]) == sorted(rows[50:]) == list(range(50))
    assert rows[:50] != rows[50:]


def test_the_order_is_a_function_of_the_seed() -> None:
    first, again, other = (list(islice(SampleOrder([20, 30], [1, 3], seed), 200)) for seed in (1, 1, 2))
    assert first == again and first != other
