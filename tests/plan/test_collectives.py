import numpy as np
import pytest

from omnitrain.plan import (
    ItemFacts,
    MicroBatchFacts,
    Placement,
    Topology,
)
from tests.plan.implied_collectives import Collective, implied_collectives
from tests.plan.random_steps import Drawn, plan_of, random_facts, random_topology

IMAGE = MicroBatchFacts(
    {"text": 3}, (5,), {"image": (ItemFacts(2, 10),), "video": (ItemFacts(2, 30), ItemFacts(2, 20))}
)
TEXT = MicroBatchFacts({"text": 3}, (5,))


def topology(**encoder: object) -> Topology:
    media = ("image", "video")
    return Topology(
        world_size=4,
        components=(
            Placement("encoder", (0, 1, 2, 3), media, num_replicas=2, **encoder),
            Placement("foundation", (0, 1, 2, 3), reads_packs=True),
        ),
        losses=("text",),
    )


def written(facts: list[Drawn], rank: int, **encoder: object) -> list[str]:
    collectives = implied_collectives(plan_of(topology(**encoder), facts), rank)
    return [f"{c.micro_batch} {c.component} {c.kind} {c.call}" for c in collectives]


def test_replicas_are_reduced_in_the_last_micro_batch_that_has_media_and_the_backward_mirrors_the_forward() -> None:
    facts = [(IMAGE, TEXT), *[(TEXT, TEXT)] * 3]
    expected = [
        "0 encoder unshard 0",
        "0 encoder unshard 1",
        "0 encoder exchange -1",
        "0 foundation unshard 0",
        "0 foundation unshard_again 0",
        "0 foundation reduce_scatter -1",
        "0 encoder exchange_back -1",
        "0 encoder unshard_again 1",
        "0 encoder unshard_again 0",
        "0 encoder reduce_scatter -1",
        "0 encoder all_reduce -1",
        "1 foundation unshard 0",
        "1 foundation unshard_again 0",
        "1 foundation reduce_scatter -1",
    ]
    assert [written(facts, rank, place="world") for rank in range(4)] == [expected] * 4
    stays_home = [line for line in expected if "exchange" not in line]
    assert written(facts, 2, place="local") == stays_home


def test_a_frozen_encoder_has_no_backward() -> None:
    facts = [(IMAGE,), *[(TEXT,)] * 3]
    assert written(facts, 3, place="world", is_trained=False) == [
        "0 encoder unshard 0",
        "0 encoder unshard 1",
        "0 encoder exchange -1",
        "0 foundation unshard 0",
        "0 foundation unshard_again 0",
        "0 foundation reduce_scatter -1",
    ]


def test_a_step_without_a_token_to_predict_has_no_backward() -> None:
    ignored = (MicroBatchFacts({"text": 0}, (5,), IMAGE.items),)
    assert written([ignored] * 4, 0) == [
        "0 encoder unshard 0",
        "0 encoder unshard 1",
        "0 foundation unshard 0",
    ]


@pytest.mark.parametrize("seed", range(15))
def test_all_ranks_of_a_component_meet_in_the_same_collectives_in_the_same_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    some = random_topology(rng)
    plan = plan_of(some, random_facts(rng, some))
    by_rank = [implied_collectives(plan, rank) for rank in range(some.world_size)]
    for component in some.components:
        for rendezvous in [component.ranks] if component.place == "world" else some.data_groups:
            assert len({of_component(by_rank[rank], component.name) for rank in rendezvous}) == 1
        calls = {tuple(c for c in of_component(by_rank[r], component.name) if c.call >= 0) for r in component.ranks}
        assert len(calls) == 1


def of_component(collectives: tuple[Collective, ...], name: str) -> tuple[Collective, ...]:
    return tuple(collective for collective in collectives if collective.component == name)
