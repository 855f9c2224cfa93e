"""The order of a step: who runs which micro-batch, and when."""

from __future__ import annotations

from dataclasses import fields
from random import Random

import pytest

from omnitrain.plan import (
    ItemFacts,
    MicroBatchFacts,
    Placement,
    StepTables,
    Topology,
    decode_tables,
    encode_table,
    plan_step,
)
from omnitrain.plan.step import Rates
from omnitrain.plan.wavefront.step import MicroBatchOrder, SectionLimits, StepOrder, rearranged

SECTION = SectionLimits(("vision",), num_ranks=1, slots=2, in_flight=None, encode_twice=False)


def topology_of(lanes: int, *, copies: int = 1, section: int = 1) -> Topology:
    """``lanes`` data-parallel ranks, each of them ``copies`` ranks with the same samples, and a section."""
    main = tuple(range(lanes * copies))
    apart = tuple(range(len(main), len(main) + section))
    components = (
        Placement("vision", apart, ("vision",), place="world", section="vision", edge="message"),
        Placement("foundation", main, reads_packs=True),
    )
    groups = [tuple(range(start, start + copies)) for start in range(0, len(main), copies)]
    return Topology(len(main) + section, components, ("text",), (*groups, *((rank,) for rank in apart)), readers=main)


def tables_of(topology: Topology, drawn: dict[int, list[tuple[list[int], list[int]]]]) -> StepTables:
    """``drawn``: owner -> for each micro-batch the lengths of its samples, and the costs of its items."""
    facts = {
        owner: tuple(
            MicroBatchFacts({"text": sum(lengths)}, tuple(lengths), {"vision": tuple(ItemFacts(c, c) for c in costs)})
            for lengths, costs in micro_batches
        )
        for owner, micro_batches in drawn.items()
    }
    ranks = range(topology.world_size)
    return decode_tables(topology, [encode_table(topology, facts.get(rank, ())) for rank in ranks])


def random_draw(random: Random, topology: Topology, number: int) -> dict[int, list[tuple[list[int], list[int]]]]:
    return {
        owner: [
            (
                [random.randint(1, 40) for _ in range(random.randint(1, 3))],
                [random.randint(1, 30) for _ in range(random.choice((0, 0, 1, 3)))],
            )
            for _ in range(number)
        ]
        for owner in topology.owners.tolist()
    }


def places_of(drawn: MicroBatchOrder) -> list[tuple[int, int]]:
    return list(zip(drawn.lane.tolist(), drawn.micro_batch.tolist(), strict=True))


@pytest.mark.parametrize("coupled", [False, True])
def test_every_micro_batch_runs_once_and_the_tables_are_those_of_a_step_drawn_in_this_order(coupled: bool) -> None:
    for seed in range(20):
        random = Random(seed)
        topology = topology_of(random.choice((1, 2, 4)), copies=random.choice((1, 2)), section=random.choice((1, 2)))
        number = random.randint(2, 5)
        drawn = random_draw(random, topology, number)
        tables = tables_of(topology, drawn)
        order = StepOrder((SECTION,), coupled)(topology, tables, Rates(1.0, {"vision": 3.0}))
        owners = topology.owners.tolist()
        runs = {
            owner: [drawn[owners[lane]][k] for lane, k in places_of(of_lane)]
            for owner, of_lane in zip(owners, order, strict=True)
        }
        places = sorted(place for of_lane in order for place in places_of(of_lane))
        assert places == [(lane, k) for lane in range(len(owners)) for k in range(number)]
        expected, found = tables_of(topology, runs), rearranged(topology, tables, order)
        for field in fields(StepTables):
            if field.name != "shape":  # indices of keys, whose order follows the ranks
                assert (getattr(found, field.name) == getattr(expected, field.name)).all(), field.name
        assert plan_step(topology, found).cost.sum() == tables.cost.sum()


def test_the_media_of_a_step_come_in_the_middle_and_equal_steps_move_no_pack() -> None:
    topology = topology_of(1)
    tables = tables_of(topology, {0: [([100], [300])] * 2 + [([100], [])] * 4})
    (order,) = StepOrder((SECTION,), coupled=False)(topology, tables, Rates(1.0, {"vision": 0.1}))
    assert order.lane.tolist() == [0] * 6
    assert order.micro_batch[0] >= 2 and order.micro_batch[-1] >= 2  # no forward and no backward of media is exposed
    two = topology_of(2)
    equal = tables_of(two, {0: [([100], [30])] * 4, 1: [([100], [30])] * 4})
    lanes = StepOrder((SECTION,), coupled=True)(two, equal, Rates(1.0, {"vision": 0.1}))
    assert [of_lane.lane.tolist() for of_lane in lanes] == [[0] * 4, [1] * 4]


def test_packs_move_where_rounds_of_equal_length_make_the_step_shorter() -> None:
    topology = topology_of(2)
    tables = tables_of(topology, {0: [([100], [])] * 4, 1: [([10], [])] * 3 + [([100], [9])]})
    lanes = StepOrder((SECTION,), coupled=True)(topology, tables, Rates(1.0, {"vision": 1.0}))
    moved = rearranged(topology, tables, lanes)
    assert tables.tokens[:, :2].max(axis=1).sum() == 400
    assert moved.tokens[:, :2].max(axis=1).sum() == 310  # three rounds of 100, one of 10


def test_the_order_is_the_same_on_every_rank() -> None:
    topology = topology_of(4, section=2)
    tables = tables_of(topology, random_draw(Random(0), topology, 16))
    order, rates = StepOrder((SECTION._replace(num_ranks=2),), coupled=True), Rates(1.0, {"vision": 1.0})
    first, again = (order(topology, tables, rates) for _ in range(2))
    assert all((a.lane == b.lane).all() for a, b in zip(first, again, strict=True))
    assert all((a.micro_batch == b.micro_batch).all() for a, b in zip(first, again, strict=True))
