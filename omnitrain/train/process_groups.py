"""The ranks of a run: this one, what they agree on, and where their data processes meet."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from omnitrain.parallel.state import ParallelState, forget_parallel_state, init_state_of
from omnitrain.parallel.step.rendezvous import Rendezvous, open_rendezvous
from omnitrain.parallel.watch.monitor import StallMonitor
from omnitrain.peers import SINGLE_PROCESS, GlooGroup, Peers, all_or_raise
from omnitrain.recipe import ParallelPlan
from omnitrain.train.launch.environment import name_to_launcher

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run, as one of them sees them.

    Attributes:
        state: how they are factorised; None: one process that lays nothing out.
        peers: what they tell each other.
        loss_peers: those of them over which losses add up. Tensor parallel peers have the same losses, and run the same
            evaluation, each among such ranks of its own.
        rendezvous: of their data processes.
    """

    state: ParallelState | None
    peers: Peers
    loss_peers: Peers
    rendezvous: Rendezvous

    @property
    def data_rank(self) -> int:
        """This rank's place among those that draw samples; ranks that share a sequence or matrices have one place."""
        return self.state.dp_rank if self.state is not None else 0

    @property
    def data_size(self) -> int:
        """How many draw samples of their own."""
        return self.state.dp_size if self.state is not None else 1

    @property
    def is_first(self) -> bool:
        """The rank that writes, prints and scores."""
        return self.peers.rank == 0

    def first(self, make: Callable[[], T]) -> T | None:
        """What ``make`` returns on the first rank, None on the others; where it raises, all raise."""
        return all_or_raise(self.peers, lambda: make() if self.is_first else None)

    def rank_by_rank(self, make: Callable[[], T]) -> T:
        """What ``make`` returns, called on the first rank before it is on the others: they find what it cached."""
        made = self.first(make)
        return all_or_raise(self.peers, lambda: make() if made is None else made)

    def watch(self, limit_s: float | None) -> StallMonitor:
        """Ends the run when a rank fails, or none moves on for ``limit_s`` seconds (None: as slow as they like).

        A process alone is not watched.
        """
        if self.rendezvous.world_size == 1:
            return StallMonitor(dist.HashStore(), 0, 1, None)
        store = dist.TCPStore(self.rendezvous.host, self.rendezvous.port, is_master=False)
        rank, world_size = self.rendezvous.rank, self.rendezvous.world_size
        return StallMonitor(store, rank, world_size, limit_s, on_failure=name_to_launcher)


def join_ranks(plan: ParallelPlan, device: torch.device, *, lays_out: bool = False) -> Ranks:
    """Take part in a run: as one of the ranks that a launcher started, or alone.

    Args:
        plan: of the run; its degrees factorise the ranks.
        device: of this rank.
        lays_out: the model is laid out by a process alone, too, whose plan says nothing.

    Raises:
        UserError: the plan's degrees do not fit the number of ranks.
    """
    is_begun = dist.is_initialized()
    num_ranks = dist.get_world_size() if is_begun else int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == 1 and plan == ParallelPlan() and not lays_out:
        return Ranks(None, SINGLE_PROCESS, SINGLE_PROCESS, open_rendezvous())
    if device.type == "cpu" and num_ranks > 1 and not is_begun:
        dist.init_process_group("gloo")
    state = init_state_of(plan)
    peers = loss_peers = GlooGroup() if state.world_size > 1 else SINGLE_PROCESS
    if len(state.loss_ranks) < state.world_size:
        loss_peers = GlooGroup(state.shape.groups("loss"))
    return Ranks(state, peers, loss_peers, open_rendezvous())


def leave_ranks() -> None:
    """End what :func:`join_ranks` began; after it this process is alone."""
    forget_parallel_state()
    if dist.is_initialized():
        dist.destroy_process_group()
