"""Each feature of a window arrives once, where it is needed and in the order of the packs, whoever has encoded it."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

from omnitrain.parallel.sections.edges import _shares, messages_of
from omnitrain.parallel.sections.message import Rows
from omnitrain.plan import Placement, StepPlan, Topology
from tests.plan.random_steps import plan_of, random_facts

ROWS = (Rows((1,), torch.int64),)


def random_plan(rng: np.random.Generator) -> StepPlan:
    """Up to eight ranks that read packs, alone or two together, two pipeline stages or one, and a section."""
    together, of_stage, stages = int(rng.integers(1, 3)), 2 * int(rng.integers(1, 5)), int(rng.integers(1, 3))
    main, of_section = of_stage * stages, int(rng.integers(1, 4))
    everyone, readers = tuple(range(main + of_section)), tuple(range(main))
    groups = [tuple(range(start, start + together)) for start in range(0, main, together)]
    topology = Topology(
        world_size=len(everyone),
        components=(
            Placement(
                "image_encoder", everyone[main:], ("image", "video"), place="world", window=int(rng.integers(1, 4))
            ),
            Placement("audio_encoder", readers[:of_stage], ("audio",)),
            Placement("image_decoder", readers[:of_stage], ("drawing",), head="drawing"),
            Placement("foundation", readers[:of_stage], reads_packs=True),
        ),
        losses=("text", "drawing"),
        data_groups=(*groups, *((rank,) for rank in everyone[main:])),
        first_stage=tuple(rank % of_stage if rank < main else rank for rank in everyone),
        readers=readers,
    )
    facts = random_facts(rng, topology)
    owners = {topology.owner_of(rank) for rank in readers}
    return plan_of(topology, [own if rank in owners else type(own)(()) for rank, own in enumerate(facts)])


@pytest.mark.parametrize("seed", range(30))
def test_every_feature_arrives_once_and_in_the_order_of_the_packs(seed: int) -> None:
    plan = random_plan(np.random.default_rng(seed))
    topology, seen = plan.topology, set()
    section = topology.component("image_encoder")
    size = section.window or plan.num_micro_batches
    medium = plan.slot % len(topology.media)
    of_section = np.isin(medium, list(topology.media_of("image_encoder")))
    for window in range(0, plan.num_micro_batches, size):
        sent = defaultdict(list)  # (sender, receiver) -> the features of its parts, in order
        for rank in section.ranks:
            made = [item for call in plan.calls_of(rank, "image_encoder", window) for item in call.items]
            features = [(item, row) for item in made for row in range(plan.item_tokens[item])]
            for share in _shares(plan, "image_encoder", window, rank):
                sent[rank, share.receiver].append([features[row] for row in share.rows.tolist()])
        for message in messages_of(plan, "image_encoder", window, ROWS):
            arrived = []
            for part in message.parts:
                of_part = sent[part.sender, message.receiver].pop(0)
                assert len(of_part) == part.rows
                arrived += of_part
            is_needed = of_section & (plan.owner == topology.owner_of(message.receiver))
            is_needed &= plan.slot // len(topology.media) == window
            items = np.flatnonzero(is_needed).tolist()
            assert arrived == [(item, row) for item in items for row in range(plan.item_tokens[item])]
            seen |= {(message.receiver, item) for item in items}
        assert not any(sent.values())
    readers = [rank for rank in topology.readers if topology.first_stage[rank] == rank]
    items = np.flatnonzero(of_section).tolist()
    assert seen == {(r, i) for r in readers for i in items if topology.owner_of(r) == plan.owner[i]}


def ends_in_order(posts: dict[int, list[tuple[int, int, int]]]) -> bool:
    """Whether all parts (sender, receiver, number) arrive if each rank's posts run one after the other, as in NCCL."""
    while any(posts.values()):
        heads = [queue[0] for queue in posts.values() if queue]
        ready = next((head for head in heads if heads.count(head) == 2), None)  # at the head of both of its ends
        if ready is None:
            return False
        for rank in ready[:2]:
            posts[rank].pop(0)
    return True


@pytest.mark.parametrize("seed", range(30))
def test_parts_arrive_in_one_group_of_all_ranks_since_all_post_them_in_one_order(seed: int) -> None:
    plan = random_plan(np.random.default_rng(seed))
    section = plan.topology.component("image_encoder")
    posts: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    sent, received = defaultdict(int), defaultdict(int)
    for window in range(0, plan.num_micro_batches, section.window or plan.num_micro_batches):
        for sender in section.ranks:
            for share in _shares(plan, "image_encoder", window, sender):
                posts[sender].append((sender, share.receiver, sent[sender, share.receiver]))
                sent[sender, share.receiver] += 1
        for message in messages_of(plan, "image_encoder", window, ROWS):
            for part in message.parts:
                end = part.sender, message.receiver
                posts[message.receiver].append((*end, received[end]))
                received[end] += 1
    assert sent == received
    assert ends_in_order(posts)


def test_senders_that_post_in_another_order_than_their_receivers_would_wait_for_ever() -> None:
    """Two senders, two receivers, one part for each pair."""
    by_receiver = {2: [(0, 2, 0), (1, 2, 0)], 3: [(0, 3, 0), (1, 3, 0)]}
    assert ends_in_order(
        {0: [(0, 2, 0), (0, 3, 0)], 1: [(1, 2, 0), (1, 3, 0)]} | {r: [*q] for r, q in by_receiver.items()}
    )
    swapped = {2: [(1, 2, 0), (0, 2, 0)], 3: [(0, 3, 0), (1, 3, 0)]}
    assert not ends_in_order({0: [(0, 2, 0), (0, 3, 0)], 1: [(1, 3, 0), (1, 2, 0)]} | swapped)
