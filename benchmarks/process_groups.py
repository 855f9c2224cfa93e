"""The process groups of a rank: those of many ranks, by torch's fake backend, and the sockets of a few real ones.

A rank's groups and their calls depend on its coordinates alone, so one process makes those of some ranks in turn, of
each pipeline stage and each section. Groups of meshes, of pairs of stages and of edges between sections count as those
of NCCL, though a machine without GPUs makes them with gloo.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

from omnitrain.parallel.pipeline.apply import connect_pairs, directions
from omnitrain.parallel.sections.carriers.torch_p2p import torch_carrier
from omnitrain.parallel.state import forget_parallel_state
from omnitrain.peers import GlooGroup, gloo_group_of
from omnitrain.recipe import ParallelPlan
from omnitrain.recipe.parallel import MAIN
from omnitrain.train import process_groups
from omnitrain.train.process_groups import join_ranks

CPU = torch.device("cpu")
HOST = ("peers",)  # groups that only gloo has
FOUNDATION = {"foundation": {"pp": 8, "ep": 8}}
SECTIONS = {"vision": {"components": ["image_encoder"], "ranks": 64}}
PLANS = {"": {"components": FOUNDATION}, "_with_sections": {"components": FOUNDATION, "sections": SECTIONS}}
STAGES = 8
# What a rank has at most, as a function of the number of ranks. A call for a group of other ranks takes 50 us and sends
# nothing; for a group of n on the host, a rank asks the store 2 n + 1 times and has n sockets.
BOUNDS = {
    "calls": lambda n: 4 * n,
    "groups": lambda n: 13,
    "communicators": lambda n: 9,
    "sockets": lambda n: 2.5 * n,
    "calls_with_sections": lambda n: 4 * n,
    "groups_with_sections": lambda n: 16,
    "communicators_with_sections": lambda n: 10,
    "sockets_with_sections": lambda n: 5.25 * n,
    "real_sockets": lambda n: 5 + 2 * n,
}


class Group(NamedTuple):
    """A call of ``new_group``: the description of the group, and its ranks."""

    name: str
    ranks: tuple[int, ...]


@contextmanager
def recorded() -> Iterator[list[Group]]:
    """Record the groups that torch is asked for, and make those of this process with the fake backend."""
    asked: list[Group] = []
    real = dist.new_group

    def new(ranks: Sequence[int], *_: Any, group_desc: str, **__: Any) -> Any:
        asked.append(Group(group_desc, tuple(ranks)))
        return real(ranks, group_desc=group_desc)

    with patch.object(dist, "new_group", new), patch.object(process_groups, "open_rendezvous"):
        yield asked


def groups_of(plan: ParallelPlan, rank: int, world: int) -> list[Group]:
    """Return the groups that a rank is asked to make, until its first step."""
    with recorded() as asked:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        state = join_ranks(plan, CPU).state
        GlooGroup()  # of a model that is spread
        assert state is not None
        main = state.of_section(MAIN)
        connect_pairs(main.groups("pp"), directions(range(STAGES)), CPU)
        gloo_group_of(main.groups("pp").tolist())
        for section in plan.sections:
            ends = state.of_section(section).ranks, main.ranks[: main.size("stage")]
            for senders, receivers in (ends, ends[::-1]):
                torch_carrier(senders, receivers, CPU)
        forget_parallel_state()
        dist.destroy_process_group()
    return asked


def simulated(world: int) -> dict[str, float]:
    """Return the most that any of some ranks has of each figure, without and with sections.

    ``calls`` of ``new_group``, most for groups of others; ``groups`` that have the rank; ``communicators`` of NCCL,
    that of all ranks included; ``sockets`` of all groups on the host.
    """
    found = {}
    for name, given in PLANS.items():
        plan = ParallelPlan.model_validate(given)
        most = {"calls": 0, "groups": 0, "communicators": 0, "sockets": 0}
        for rank in (*range(0, world, world // STAGES), world - 1):
            asked = groups_of(plan, rank, world)
            own = [group for group in asked if rank in group.ranks]
            shared = [group for group in own if len(group.ranks) > 1 and group.name not in HOST]
            on_host = [group for group in own if group.name != "section_edge" and not _is_pair(group)]
            values = len(asked), len(own) + 1, len(shared) + 1, world + sum(len(group.ranks) for group in on_host)
            most = {key: max(most[key], value) for key, value in zip(most, values, strict=True)}
        found |= {f"process_{key}{name}_{world}": float(value) for key, value in most.items()}
    return found


def exceeded(figures: Mapping[str, float]) -> list[str]:
    """Return the figures of process groups that are above their bounds."""
    found = [(name, *name.removeprefix("process_").rsplit("_", 1)) for name in figures if name.startswith("process_")]
    assert len(found) >= len(BOUNDS) - 1, "nothing was measured"
    limits = [(name, BOUNDS[key](int(world))) for name, key, world in found]
    return [f"{name} is {figures[name]:g}, more than {limit:g}" for name, limit in limits if figures[name] > limit]


def _is_pair(group: Group) -> bool:
    return group.name == "pp" and len(group.ranks) == 2


def real(world: int) -> dict[str, float]:
    """Return how many sockets a rank has once it has joined a run of ``world`` ranks, the most of all; 0: none."""
    if not world:
        return {}
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as the launcher has it
    found = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_sockets_of, (world, store.port, found), world)
    return {f"process_real_sockets_{world}": float(max(found.get() for _ in range(world)))}


def _sockets_of(rank: int, world: int, port: int, found: Any) -> None:
    where = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    where |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in where.items()})
    ranks = join_ranks(ParallelPlan(), CPU)
    GlooGroup()  # of a model that is spread
    found.put(_open_sockets())
    ranks.peers.gather(rank)  # all have counted
    dist.destroy_process_group()


def _open_sockets() -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and os.readlink(link).startswith("socket") for link in links)
