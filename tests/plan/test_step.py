import copy
import pickle
from collections import Counter, defaultdict
from dataclasses import fields

import numpy as np
import pytest

from omnitrain.plan import (
    Call,
    ItemFacts,
    MicroBatchFacts,
    Placement,
    StepPlan,
    Topology,
)
from tests.plan.implied_collectives import has_exchange, implied_collectives
from tests.plan.random_steps import Drawn, plan_of, random_facts, random_topology

SEEDS = range(25)


def random_plan(seed: int) -> tuple[StepPlan, list[Drawn]]:
    rng = np.random.default_rng(seed)
    topology = random_topology(rng)
    facts = random_facts(rng, topology)
    return plan_of(topology, facts), facts


def batches(facts: list[Drawn]) -> list[tuple[int, int, MicroBatchFacts]]:
    return [(rank, m, batch) for rank, own in enumerate(facts) for m, batch in enumerate(own)]


def listed_items(plan: StepPlan, facts: list[Drawn]) -> list[tuple[int, int, str, ItemFacts]]:
    """All items in the order of their numbers."""
    media = plan.topology.media
    return [(r, m, medium, item) for r, m, batch in batches(facts) for medium in media for item in batch.items[medium]]


def is_minimal(plan: StepPlan, rank: int, m: int, call: Call) -> bool:
    return bool(call.index >= plan.calls_with_data[m, call.call_site, rank])


def group_of(plan: StepPlan, rank: int) -> tuple[int, ...]:
    return next(group for group in plan.topology.data_groups if rank in group)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_item_is_encoded_once_by_a_rank_that_may_and_reaches_each_consumer_once(seed: int) -> None:
    plan, facts = random_plan(seed)
    items, topology = listed_items(plan, facts), plan.topology
    encoded: Counter[int] = Counter()
    for component in topology.components:
        for m in range(plan.num_micro_batches):
            for rank in component.ranks:
                for call in plan.calls_of(rank, component.name, m):
                    encoded.update(call.items)
                    for item in call.items:
                        owner, micro_batch, medium, _ = items[item]
                        assert (micro_batch, medium) == (m, topology.call_sites[call.call_site].name)
                        allowed = {"local": {owner}, "group": {*group_of(plan, owner)}, "world": {*component.ranks}}
                        assert rank == plan.producer[item]
                        assert rank in allowed[component.place]
            routes = plan.routes(component.name, m)
            expected = {
                (number, consumer)
                for number, (owner, micro_batch, medium, _) in enumerate(items)
                if micro_batch == m and medium in component.media
                for consumer in group_of(plan, owner)
            }
            assert Counter(zip(routes.item.tolist(), routes.consumer.tolist(), strict=True)) == Counter(expected)
            assert all(items[item][3].num_tokens == rows for item, rows in zip(routes.item, routes.rows, strict=True))
    assert encoded == Counter(range(len(items)))


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_are_equal_on_all_ranks_of_a_component_and_no_more_than_the_busiest_needs(seed: int) -> None:
    plan, facts = random_plan(seed)
    items, topology = listed_items(plan, facts), plan.topology
    for component in topology.components:
        for m in range(plan.num_micro_batches):
            made = {rank: plan.calls_of(rank, component.name, m) for rank in component.ranks}
            assert len({tuple((call.call_site, call.index) for call in calls) for calls in made.values()}) == 1
            for calls in zip(*made.values(), strict=True):
                idle = [is_minimal(plan, rank, m, call) for rank, call in zip(made, calls, strict=True)]
                assert not all(idle)
                if topology.call_sites[calls[0].call_site].kind == "encode":
                    assert idle == [not call.items for call in calls]
            for call in (call for calls in made.values() for call in calls if call.items):
                assert len({items[item][3].shape for item in call.items}) == 1
                assert list(call.items) == sorted(call.items)
                elements = [items[item][3].elements for item in call.items]
                assert len(elements) == 1 or component.call_elements is None or sum(elements) <= component.call_elements


@pytest.mark.parametrize("seed", SEEDS)
def test_a_component_runs_where_any_rank_has_data_and_reduces_in_its_last_such_micro_batch(seed: int) -> None:
    plan, facts = random_plan(seed)
    active = defaultdict(set)
    for _, m, batch in batches(facts):
        active["foundation"].add(m)
        for component in plan.topology.components:
            if any(batch.items[medium] for medium in component.media):
                active[component.name].add(m)
    assert plan.num_micro_batches == max((len(own) for own in facts), default=0)
    for component in plan.topology.components:
        running = {m for m in range(plan.num_micro_batches) if plan.is_active(component.name, m)}
        assert running == active[component.name]
        assert plan.last_active(component.name) == max(running, default=None)


@pytest.mark.parametrize("seed", SEEDS)
def test_counts_and_tokens_are_those_of_all_ranks_together(seed: int) -> None:
    plan, facts = random_plan(seed)
    for loss in plan.topology.losses:
        assert plan.loss_counts[loss] == sum(batch.counts[loss] for _, _, batch in batches(facts))
    for rank, own in enumerate(facts):
        drawn = [sum(batch.lengths) for batch in own]
        assert plan.tokens[:, rank].tolist() == drawn + [0] * (plan.num_micro_batches - len(drawn))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_item_goes_from_who_encodes_it_to_all_that_share_its_sample_in_order(seed: int) -> None:
    plan, _ = random_plan(seed)
    group_of = {rank: set(group) for group in plan.topology.data_groups for rank in group}
    for component in [c.name for c in plan.topology.components if c.media]:
        for m in range(plan.num_micro_batches):
            routes, calls = plan.routes(component, m), {}
            for rank in range(plan.topology.world_size):
                calls |= {item: rank for call in plan.calls_of(rank, component, m) for item in call.items}
                own = routes.item[routes.consumer == rank].tolist()
                assert own == sorted(own)
            assert set(routes.item.tolist()) == calls.keys()
            for item in calls:
                ways = routes.item == item
                assert set(routes.consumer[ways].tolist()) == group_of[int(plan.owner[item])]
                assert set(routes.producer[ways].tolist()) == {plan.producer[item]}
                assert set(routes.rows[ways].tolist()) == {plan.item_tokens[item]}


def content(plan: StepPlan) -> list[object]:
    values = (getattr(plan, field.name) for field in fields(plan))
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_compute_the_same_plan_and_another_table_gives_another(seed: int) -> None:
    plan, facts = random_plan(seed)
    again = plan_of(pickle.loads(pickle.dumps(plan.topology)), copy.deepcopy(facts))
    assert content(again) == content(plan)
    facts[0] = (*facts[0], MicroBatchFacts(lengths=(1,)))
    assert content(plan_of(plan.topology, facts)) != content(plan)


def test_nobody_has_data() -> None:
    topology = random_topology(np.random.default_rng(0))
    plan = plan_of(topology, [()] * topology.world_size)
    assert plan.num_micro_batches == 0
    assert plan.loss_counts == {"text": 0, "drawing": 0}
    assert plan.last_active("image_encoder") is None
    assert implied_collectives(plan, 0) == ()


def two_ranks(place: str = "local", **more: object) -> Topology:
    encoder = Placement("encoder", (0, 1), ("image",), place=place, **more)
    return Topology(2, (encoder, Placement("foundation", (0, 1), reads_packs=True)), ("text",))


def drew(*costs: int) -> MicroBatchFacts:
    return MicroBatchFacts({"text": 5}, (9,), {"image": tuple(ItemFacts(num_tokens=2, cost=cost) for cost in costs)})


def test_a_text_only_rank_takes_part_with_minimal_input_and_a_text_only_batch_runs_no_encoder() -> None:
    plan = plan_of(two_ranks(), [(drew(7, 7), drew()), (drew(),)])
    assert [call.items for call in plan.calls_of(1, "encoder", 0)] == [()]
    assert plan.calls_of(0, "encoder", 0)[0].items == (0, 1)
    assert plan.calls_of(0, "encoder", 1) == plan.calls_of(1, "encoder", 1) == ()
    assert is_minimal(plan, 1, 1, plan.calls_of(1, "foundation", 1)[0])
    assert (plan.last_active("encoder"), plan.last_active("foundation")) == (0, 1)


def test_ranks_that_share_a_component_make_the_same_calls_and_nothing_moves() -> None:
    everyone = tuple(range(4))
    shared = Placement("encoder", everyone, ("image",), place="group", call_groups=((0, 1), (2, 3)), is_shared=True)
    topology = Topology(4, (shared,), ("text",), ((0, 1), (2, 3)))
    plan = plan_of(topology, [(drew(7, 4),), (), (drew(),), ()])
    calls = [plan.calls_of(rank, "encoder", 0) for rank in everyone]
    assert calls[0] == calls[1] and calls[0][0].items == (0, 1)
    assert [not call.items for own in calls for call in own] == [False, False, True, True]
    assert not any(has_exchange(plan, "encoder", 0, rank) for rank in everyone)
    assert plan.loads("encoder").tolist() == [[6, 6, 0, 0]]
    assert "0 of them travel; minimal inputs on 2 ranks" in str(plan)


# Two ranks of a sequence (the first digit of a rank) and two of tensor parallelism (the last one).
FOUR = (0, 1, 2, 3)
BY_TENSORS, BY_SEQUENCE = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def plan_of_four(*costs: int, **encoder: object) -> StepPlan:
    component = Placement("encoder", FOUR, ("image",), **encoder)
    topology = Topology(4, (component,), ("text",), (FOUR,))
    return plan_of(topology, [(drew(*costs),), *[()] * 3])


@pytest.mark.parametrize("place", ["group", "world"])
def test_items_whose_results_depend_on_each_other_are_encoded_by_one_rank(place: str) -> None:
    """Of three samples, two items each: batch normalization sees both in one call, as in one process."""
    costs = {1: (5, 4), 2: (9, 1), 3: (7, 7)}
    items = tuple(ItemFacts(2, cost, shape, together=True) for shape, both in costs.items() for cost in both)
    drawn = MicroBatchFacts({"text": 5}, (9,), {"image": items})
    topology = Topology(4, (Placement("encoder", FOUR, ("image",), place=place),), ("text",), (FOUR,))
    plan = plan_of(topology, [(drawn,), *[()] * 3])
    calls = [call.items for rank in FOUR for call in plan.calls_of(rank, "encoder", 0) if call.items]
    assert sorted(calls) == [(0, 1), (2, 3), (4, 5)]
    assert sorted(plan.loads("encoder")[0].tolist()) == [0, 9, 10, 14]


def test_all_ranks_that_hold_a_sample_divide_its_items_and_get_the_features_of_each() -> None:
    plan = plan_of_four(7, 4, 2, 6, place="group")
    assert [own[0].items for own in (plan.calls_of(rank, "encoder", 0) for rank in FOUR)] == [(0,), (3,), (1,), (2,)]
    assert plan.loads("encoder").tolist() == [[7, 6, 4, 2]]
    routes = plan.routes("encoder", 0)
    assert routes.consumer.tolist() == np.repeat(FOUR, 4).tolist()
    assert routes.producer.tolist() == [0, 2, 3, 1] * 4
    assert "largest cost of a rank / mean: 1.47" in str(plan)  # 7 / (19 / 4)


@pytest.mark.parametrize(
    ("call_groups", "is_shared", "loads", "producers"),
    [
        (BY_TENSORS, True, [4, 4, 2, 2], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (BY_TENSORS, False, [7, 7, 4, 4], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (BY_SEQUENCE, True, [4, 2, 4, 2], [[0, 1], [0, 1], [2, 3], [2, 3]]),
    ],
    ids=["a tower on two tensor parallel ranks", "each tensor parallel rank encodes", "a tower on a sequence's ranks"],
)
def test_ranks_that_make_a_call_together_each_send_its_features_to_one_rank_of_every_other_such_group(
    call_groups: tuple[tuple[int, ...], ...], is_shared: bool, loads: list[int], producers: list[list[int]]
) -> None:
    plan = plan_of_four(7, 4, place="group", call_groups=call_groups, is_shared=is_shared)
    made = [plan.calls_of(rank, "encoder", 0)[0].items for rank in FOUR]
    assert [{made[rank] for rank in group} for group in call_groups] == [{(0,)}, {(1,)}]
    assert plan.loads("encoder").tolist() == [loads]
    assert plan.routes("encoder", 0).producer.reshape(4, 2).tolist() == producers


def test_tensor_parallel_ranks_that_each_encode_their_own_samples_send_nothing() -> None:
    component = Placement("encoder", (0, 1), ("image",), call_groups=((0, 1),))
    plan = plan_of(Topology(2, (component,), ("text",), ((0, 1),)), [(drew(7, 4),), ()])
    assert not plan.topology.moves("encoder") and not has_exchange(plan, "encoder", 0, 1)
    assert plan.calls_of(0, "encoder", 0) == plan.calls_of(1, "encoder", 0)
    assert plan.loads("encoder").tolist() == [[11, 11]]


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (([5, 3], [3, 5]), [{0, 1}, {2, 3}]),  # balanced: no item leaves the ranks that hold it
        (([5], [4]), [{0}, {2}]),
        (([5, 3, 8, 1], []), [{0, 1, 2, 3}, set()]),
    ],
)
def test_items_leave_the_ranks_that_hold_them_only_where_that_lowers_the_largest_cost(
    costs: tuple[list[int], list[int]], expected: list[set[int]]
) -> None:
    component = Placement("encoder", FOUR, ("image",), place="world")
    topology = Topology(4, (component,), ("text",), BY_TENSORS)
    of_group = [(drew(*own),) for own in costs]
    plan = plan_of(topology, [of_group[0], (), of_group[1], ()])
    assert [{*plan.producer[plan.owner == owner].tolist()} for owner in (0, 2)] == expected


def test_call_groups_that_no_plan_can_have_are_refused() -> None:
    def refused(*groups: tuple[int, ...]) -> str:
        component = Placement("encoder", FOUR, ("image",), call_groups=groups)
        with pytest.raises(ValueError) as error:
            Topology(4, (component,), ("text",), BY_TENSORS)
        return str(error.value)

    assert "expected each of its ranks in exactly one group" in refused((0, 1), (2,))
    assert "expected groups of one size" in refused((0, 1), (2,), (3,))
    assert "expected each within one of ((0, 1), (2, 3))" in refused(*BY_SEQUENCE)


def test_work_shared_with_the_world_is_balanced_where_one_rank_drew_it_all() -> None:
    rng = np.random.default_rng(3)
    everyone = tuple(range(8))
    topology = Topology(8, (Placement("encoder", everyone, ("image",), place="world"),), ())
    images = tuple(ItemFacts(4, int(cost) + 1) for cost in rng.lognormal(5, 1, 400))
    facts = [(MicroBatchFacts(lengths=(1,), items={"image": images}),), *[()] * 7]
    loads = plan_of(topology, facts).loads("encoder")[0]
    assert loads.max() / loads.mean() < 1.01


@pytest.mark.parametrize(
    ("place", "expected"),
    [("local", (4, 0, 1.625, 1.625)), ("world", (4, 1, 1.625, 1.125))],
)
def test_the_balance_of_a_step_is_that_of_the_busiest_rank_of_each_micro_batch(
    place: str, expected: tuple[int, int, float, float]
) -> None:
    facts = [(drew(4, 4), drew(3)), (drew(), drew(5))]
    plan = plan_of(two_ranks(place), facts)
    assert plan.balance("encoder") == expected
    assert plan.balance("foundation") is None


def test_the_dump_tells_what_each_component_does() -> None:
    text = str(plan_of(two_ranks("world"), [(drew(6, 4, 2), drew()), (drew(),)]))
    assert "2 ranks, 2 micro-batches" in text
    assert "predicted tokens: text 15" in text
    work = "{} calls, {} items, {} of them travel; minimal inputs on {} ranks; largest cost of a rank / mean: 1.00"
    assert text.splitlines()[3:] == [
        f"micro-batch 0, encoder: {work.format(1, 3, 2, 0)}; gradients are reduced",
        f"micro-batch 0, foundation: {work.format(1, 0, 0, 0)}",
        f"micro-batch 1, foundation: {work.format(1, 0, 0, 1)}; gradients are reduced",
    ]
