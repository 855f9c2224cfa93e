from __future__ import annotations

import numpy as np
import pytest

from omnitrain.parallel.step.feature_routing import routes_to_slices
from omnitrain.plan.sequence import split_sequence
from omnitrain.plan.step import RowRoutes


@pytest.mark.parametrize(("sp", "cp"), [(2, 1), (1, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("seed", range(8))
def test_each_row_of_a_medium_goes_to_the_rank_of_its_token_and_to_no_other(sp: int, cp: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    ranks, first = sp * cp, sp * cp * int(generator.integers(0, 3))  # of several groups of ranks, one
    num_tokens = int(generator.integers(20, 60))
    taken = np.sort(generator.permutation(num_tokens)[: generator.integers(1, 20)])
    cuts = np.sort(generator.choice(len(taken) + 1, 3))  # an item may have no row, and rows anywhere
    tokens = np.split(taken, cuts)
    numbers = 10 + np.arange(len(tokens))
    rows, producer = np.array([len(own) for own in tokens]), first + generator.integers(0, ranks, len(tokens))
    items = [np.tile(column, ranks) for column in (numbers, producer)]
    consumer = np.repeat(first + np.arange(ranks), len(tokens))
    routes = RowRoutes(items[0], items[1], consumer, np.tile(rows, ranks))
    split = split_sequence(num_tokens, sp=sp, cp=cp)

    made_by, received = {}, None
    for rank in range(first, first + ranks):
        made = generator.permutation(numbers[producer == rank]).tolist()
        runs, order = routes_to_slices(routes, rank, taken, split, made)
        lengths = dict(zip(runs.item.tolist(), runs.rows.tolist(), strict=True))
        sent = np.concatenate([np.zeros(0, dtype=int), *(tokens[number - 10] for number in made)])
        stops = np.cumsum([lengths[run] for run in order]).astype(int)
        made_by |= dict(zip(order, np.split(sent, stops[:-1]) if order else [], strict=True))
        assert received is None or all((a == b).all() for a, b in zip(received, vars(runs).values(), strict=True))
        received = list(vars(runs).values())
    for place, own in enumerate(split.positions):
        got = [made_by[run] for run in runs.item[runs.consumer == first + place].tolist()]
        assert np.concatenate([np.zeros(0, dtype=int), *got]).tolist() == [token for token in taken if token in own]
    assert runs.rows.sum() == len(taken)
