from __future__ import annotations

import numpy as np
import pytest

from omnitrain.parallel.step.feature_routing import routes_to_slices
from omnitrain.plan.sequence import split_sequence
from omnitrain.plan.step import RowRoutes


@pytest.mark.parametrize(("sp", "cp", "tp"), [(2, 1, 1), (1, 2, 1), (2, 2, 1), (3, 1, 1), (2, 1, 2), (2, 2, 3)])
@pytest.mark.parametrize("seed", range(8))
def test_each_row_of_a_medium_goes_to_the_ranks_of_its_token_and_to_no_other(
    sp: int, cp: int, tp: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    ranks = sp * cp * tp
    group = ranks * int(generator.integers(0, 3)) + np.arange(ranks)  # one of several data groups
    num_tokens = int(generator.integers(20, 60))
    taken = np.sort(generator.permutation(num_tokens)[: generator.integers(1, 20)])
    cuts = np.sort(generator.choice(len(taken) + 1, 3))  # an item may have no row, and rows anywhere
    tokens = np.split(taken, cuts)
    numbers = 10 + np.arange(len(tokens))
    rows, producer = np.array([len(own) for own in tokens]), generator.choice(group, len(tokens))
    items = [np.tile(column, ranks) for column in (numbers, producer)]
    routes = RowRoutes(items[0], items[1], np.repeat(group, len(tokens)), np.tile(rows, ranks))
    split = split_sequence(num_tokens, sp=sp, cp=cp)

    made_by, received = {}, None
    for rank in group:
        made = generator.permutation(numbers[producer == rank]).tolist()
        runs, order = routes_to_slices(routes, group, taken, split, made)
        lengths = dict(zip(runs.item.tolist(), runs.rows.tolist(), strict=True))
        sent = np.concatenate([np.zeros(0, dtype=int), *(tokens[number - 10] for number in made)])
        stops = np.cumsum([lengths[run] for run in order]).astype(int)
        made_by |= dict(zip(order, np.split(sent, stops[:-1]) if order else [], strict=True))
        assert received is None or all((a == b).all() for a, b in zip(received, vars(runs).values(), strict=True))
        received = list(vars(runs).values())
    for nth, rank in enumerate(group):
        got = [made_by[run] for run in runs.item[runs.consumer == rank].tolist()]
        expected = [token for token in taken if token in split.positions[nth // tp]]
        assert np.concatenate([np.zeros(0, dtype=int), *got]).tolist() == expected
    assert runs.rows.sum() == len(taken) * tp


def test_of_ranks_that_encode_an_item_together_each_sends_to_its_own_consumers() -> None:
    """Two slices, two tensor parallel ranks of each; rank 2 of the first slice and rank 3 of the second encode."""
    group, producers = [0, 1, 2, 3], [2, 3, 2, 3]
    routes = RowRoutes(np.full(4, 7), np.array(producers), np.array(group), np.full(4, 5))
    runs, order = routes_to_slices(routes, group, np.arange(2, 7), split_sequence(8, sp=2, cp=1), [7])
    assert order == [0, 1]
    assert list(zip(runs.item, runs.producer, runs.consumer, runs.rows, strict=True)) == [
        (0, 2, 0, 2), (0, 3, 1, 2), (1, 2, 2, 3), (1, 3, 3, 3)
    ]  # fmt: skip
