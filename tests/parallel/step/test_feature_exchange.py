import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.step.feature_exchange import Exchange
from omnitrain.plan import RowRoutes
from tests.waits import DEVICE, Device

SHAPES = [((3,), torch.float32), ((), torch.int64), ((2, 2), torch.float32), ((5,), torch.bfloat16)]


def routes_of(entries: Sequence[tuple[int, int, int, int]]) -> RowRoutes:
    """Of ``(item, producer, consumer, rows)``."""
    return RowRoutes(*np.array(entries, dtype=np.int64).reshape(-1, 4).T)


def random_routes(seed: int, world: int) -> RowRoutes:
    """Items without rows, ranks without items, and in one of four plans no item at all."""
    draw = np.random.default_rng(seed)
    entries = []
    idle = draw.integers(world + 1)
    for item in range(draw.integers(12) if seed % 4 else 0):
        producer, rows = draw.integers(world), draw.integers(4)
        consumers = draw.permutation(world)[: draw.integers(1, world + 1)]
        entries += [(item, producer, consumer, rows) for consumer in consumers if consumer != idle or world == 1]
    draw.shuffle(entries)
    return routes_of(entries)


def content(item: int, rows: int) -> list[Tensor]:
    """What an item's rows are in each of the tensors: the same on all ranks."""
    draw = torch.Generator().manual_seed(item)
    return [
        torch.randn(rows, *shape, generator=draw).to(dtype) if dtype.is_floating_point
        else torch.randint(100, (rows, *shape), generator=draw)
        for shape, dtype in SHAPES
    ]  # fmt: skip


def joined(items: Sequence[int], rows: dict[int, int]) -> list[Tensor]:
    parts = [content(item, rows[item]) for item in items]
    empty = [torch.empty(0, *shape, dtype=dtype) for shape, dtype in SHAPES]
    return [torch.cat(tensors) for tensors in zip(empty, *parts, strict=True)]


def inner(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Over all ranks."""
    total = torch.zeros((), dtype=torch.float64)
    for one, other in zip(ones, others, strict=True):
        total += (one.double() * other.double()).sum()
    dist.all_reduce(total)
    return total.item()


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """Bytes that this rank sends in each collective."""
    sent: list[int] = []
    all_to_all = dist.all_to_all_single

    def counting(output: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(rows.nbytes)
        return all_to_all(output, rows, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        yield sent


def exchange_random_plans(seeds: Sequence[int]) -> list[tuple[float, float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    return [exchange_and_back(random_routes(seed, world), rank, seed) for seed in seeds]


def exchange_and_back(routes: RowRoutes, rank: int, seed: int) -> tuple[float, float]:
    """<Ex, y> and <x, E'y>, after the rows themselves have been checked."""
    rows = dict(zip(routes.item.tolist(), routes.rows.tolist(), strict=True))
    made = np.unique(routes.item[routes.producer == rank])
    np.random.default_rng(seed + rank).shuffle(made)
    needed = routes.item[routes.consumer == rank].tolist()
    inputs = joined(made.tolist(), rows)
    exchange = Exchange(routes, made=made.tolist())
    outputs = exchange.send(inputs)
    for output, expected in zip(outputs, joined(needed, rows), strict=True):
        assert output.dtype == expected.dtype
        assert torch.equal(output, expected)
    floating = [output for output in outputs if output.is_floating_point()]
    gradients = [torch.randint(-4, 5, output.shape).to(output.dtype) for output in floating]  # exact in bf16, too
    returned = exchange.send_back(gradients)
    return inner(floating, gradients), inner(returned, [tensor for tensor in inputs if tensor.is_floating_point()])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_exchange_moves_every_row_and_the_way_back_is_the_transpose(ranks: RankPool, world: int) -> None:
    results = ranks.run(exchange_random_plans, range(30), timeout_s=60, world=world)
    for there, back in results[0]:
        assert abs(there - back) <= 1e-6 * abs(there)
    assert sum(there != 0 for there, _ in results[0]) > 15


def exchange_once(entries: Sequence[tuple[int, int, int, int]]) -> tuple[list[int], list[float], list[float]]:
    """Bytes sent there and back; the rows that arrived; the gradients, where each consumer's are 10 ** its rank."""
    rank, routes = dist.get_rank(), routes_of(entries)
    own = {item: rows for item, producer, _, rows in entries if producer == rank}
    tensors = [torch.cat([torch.empty(0), *(torch.full((own[item],), float(item)) for item in sorted(own))])]
    tensors += [torch.zeros(len(tensors[0]), 2, dtype=torch.bfloat16), torch.zeros(len(tensors[0]), dtype=torch.int32)]
    with counted_collectives() as sent:
        exchange = Exchange(routes)
        arrived, other, _ = exchange.send(tensors)
        gradient, _ = exchange.send_back([torch.full_like(arrived, 10.0**rank), torch.zeros_like(other)])
    return sent, arrived.tolist(), gradient.tolist()


TO_ALL = [(7, 1, consumer, 2) for consumer in range(4)]
ROW_BYTES, GRADIENT_BYTES = 4 + 4 + 4, 4 + 4


def test_gradients_of_several_consumers_add_up(ranks: RankPool) -> None:
    results = ranks.run(exchange_once, TO_ALL, timeout_s=30)
    assert [gradient for _, _, gradient in results] == [[], [1111.0] * 2, [], []]


def test_one_collective_there_and_one_back_also_on_ranks_without_items(ranks: RankPool) -> None:
    results = ranks.run(exchange_once, [(3, 0, 1, 2), (4, 0, 0, 0), (5, 0, 0, 1)], timeout_s=30)
    assert [sent for sent, _, _ in results] == [
        [3 * ROW_BYTES, GRADIENT_BYTES],
        [0, 2 * GRADIENT_BYTES],
        [0, 0],
        [0, 0],
    ]
    assert [arrived for _, arrived, _ in results] == [[5.0], [3.0, 3.0], [], []]
    assert results[0][2] == [10.0, 10.0, 1.0]


def test_nothing_is_sent_where_every_item_stays_on_its_rank(ranks: RankPool) -> None:
    results = ranks.run(exchange_once, [(rank, rank, rank, rank) for rank in range(4)], timeout_s=30)
    assert [sent for sent, _, _ in results] == [[]] * 4
    assert [(arrived, gradient) for _, arrived, gradient in results] == [
        ([float(rank)] * rank, [10.0**rank] * rank) for rank in range(4)
    ]


def waits_of_an_exchange() -> dict[str, int]:
    rank = dist.get_rank()
    exchange = Exchange(routes_of([(0, 0, 1, 2), (1, 1, 0, 3)]))
    rows = torch.ones(2 + rank, 4)
    device = Device([rows])
    with device.watched():
        exchange.send([rows.to(DEVICE, non_blocking=True)])
    return device.waits


def test_rows_move_without_a_wait_for_the_device(ranks: RankPool) -> None:
    assert ranks.run(waits_of_an_exchange, timeout_s=60, world=2) == [{}, {}]


def exchange_in_pairs() -> list[float]:
    """Ranks 0 and 1, and 2 and 3, swap their items."""
    groups = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    rank = dist.get_rank()
    routes = routes_of([(producer, producer, producer ^ 1, 1 + producer) for producer in range(4)])
    (arrived,) = Exchange(routes, groups[rank // 2]).send([torch.full((1 + rank,), float(rank))])
    return arrived.tolist()


def test_a_group_exchanges_its_own_entries_of_the_table(ranks: RankPool) -> None:
    assert ranks.run(exchange_in_pairs, timeout_s=30) == [[1.0] * 2, [0.0], [3.0] * 4, [2.0] * 3]


def wrong_number_of_rows() -> None:
    Exchange(routes_of([(1, 0, 0, 2)])).send([torch.zeros(3, 4)])


def test_rows_are_counted_before_anything_moves(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0: found 3 rows; expected 2, one per row of its items"):
        ranks.run(wrong_number_of_rows, timeout_s=30, world=1)
