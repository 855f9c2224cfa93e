"""Random topologies and tables, from one seed each."""

from __future__ import annotations

from typing import get_args

import numpy as np

from omnitrain.plan import (
    ItemFacts,
    MicroBatchFacts,
    Placement,
    StepPlan,
    Topology,
    decode_tables,
    encode_table,
    plan_step,
)
from omnitrain.plan.placement import Place

Drawn = tuple[MicroBatchFacts, ...]  # by a rank


def random_topology(rng: np.random.Generator) -> Topology:
    """1 to 64 ranks in data groups of 1, 2 or 4; an image, an audio and a text component, a decoder."""
    group_size = int(rng.choice([1, 2, 4]))
    world_size = group_size * int(rng.integers(1, 64 // group_size + 1))
    ranks = rng.permutation(world_size).tolist()
    everyone, place = tuple(range(world_size)), rng.choice(get_args(Place), 2)
    some = everyone[: int(rng.integers(1, world_size + 1))] if place[0] == "world" else everyone
    limit = None if rng.random() < 0.5 else 120
    return Topology(
        world_size=world_size,
        components=(
            Placement("image_encoder", some, ("image", "video"), place=place[0], call_elements=limit),
            Placement("audio_encoder", everyone, ("audio",), place=place[1]),
            Placement("image_decoder", everyone, ("drawing",), head="drawing"),
            Placement("foundation", everyone, reads_packs=True),
        ),
        losses=("text", "drawing"),
        data_groups=tuple(tuple(ranks[i : i + group_size]) for i in range(0, world_size, group_size)),
    )


def random_facts(rng: np.random.Generator, topology: Topology, most_items: int = 4) -> list[Drawn]:
    """Tables of all ranks: some are empty, some text only; the first rank of a data group owns its samples."""
    owners = {group[0] for group in topology.data_groups}
    kind = rng.choice(["mixed", "mixed", "mixed", "text", "nothing"], topology.world_size)
    return [
        tuple(_micro_batch(rng, topology, most_items * (kind[rank] == "mixed")) for _ in range(rng.integers(0, 4)))
        if rank in owners and kind[rank] != "nothing"
        else ()
        for rank in range(topology.world_size)
    ]


def plan_of(topology: Topology, facts: list[Drawn]) -> StepPlan:
    """The plan from the tables as they go over the wire."""
    return plan_step(topology, decode_tables(topology, [encode_table(topology, own) for own in facts]))


def _micro_batch(rng: np.random.Generator, topology: Topology, most_items: int) -> MicroBatchFacts:
    items = {
        medium: tuple(
            ItemFacts(
                int(rng.integers(1, 50)), int(rng.lognormal(4, 1.5)), int(rng.integers(0, 3)), int(rng.integers(0, 90))
            )
            for _ in range(rng.integers(0, most_items + 1))
        )
        for medium in topology.media
    }
    drawn = sum(item.num_tokens for item in items["drawing"])
    return MicroBatchFacts(
        {"text": int(rng.integers(0, 100)), "drawing": drawn}, tuple(rng.integers(1, 900, 3).tolist()), items
    )
