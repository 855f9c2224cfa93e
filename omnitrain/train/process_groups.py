"""The ranks of a run, their process groups, and the rendezvous of their data processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from omnitrain.parallel.join import join_process_group
from omnitrain.parallel.state import ParallelState, init_state_of, open_process_group
from omnitrain.parallel.step.rendezvous import Rendezvous, open_rendezvous
from omnitrain.parallel.watch.monitor import StallMonitor
from omnitrain.peers import SINGLE_PROCESS, GlooGroup, Peers, all_or_raise
from omnitrain.recipe import ParallelPlan
from omnitrain.recipe.parallel import MAIN
from omnitrain.train.launch.environment import name_to_launcher

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run, as seen by one of them."""

    state: ParallelState | None  # the parallel state. None: a single process that does not shard its model
    peers: Peers  # group of all ranks
    # group of the ranks over which losses add up. Tensor parallel peers have the same losses and run the same
    # evaluation, each in its own group; so do pipeline stages
    loss_peers: Peers
    # group of the ranks whose losses are those of all samples: ``loss_peers`` and their pipeline stages
    meter_peers: Peers
    rendezvous: Rendezvous  # rendezvous of the data processes

    @property
    def state_of_main(self) -> ParallelState | None:
        """The state of the ranks that read data; None: a single process that does not shard its model."""
        return None if self.state is None else self.state.of_section(MAIN)

    @property
    def data_rank(self) -> int | None:
        """Rank among those that draw different samples, equal where they share some; None: the section draws none."""
        if self.state is None:
            return 0
        return self.state.dp_rank if self.state.section == MAIN else None

    @property
    def data_size(self) -> int:
        """Number of ranks that draw different samples."""
        return self.state_of_main.dp_size if self.state_of_main is not None else 1

    @property
    def is_first_with_its_samples(self) -> bool:
        """Whether this rank draws samples, and no rank before it in a pipeline or a data group has the same ones."""
        state = self.state
        if state is None:
            return True
        return state.section == MAIN and state.pp_rank == 0 and state.ranks_along("data")[0] == state.rank

    @property
    def holds_source(self) -> bool:
        """Whether this rank loads whole weights, for itself and the other ranks of its section."""
        return self.state is None or self.state.rank == self.state.first_rank

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes, prints and scores."""
        return self.peers.rank == 0

    def first(self, make: Callable[[], T]) -> T | None:
        """Call ``make`` on the first rank and return its result there, else None. If it raises, all ranks raise."""
        return all_or_raise(self.peers, lambda: make() if self.is_first else None)

    def rank_by_rank(self, make: Callable[[], T]) -> T:
        """Call ``make`` on the first rank, then on the other ranks, which find its cached files. Return its result."""
        of_first = self.first(make)
        return all_or_raise(self.peers, lambda: make() if of_first is None else of_first)

    def watch(self, limit_s: float | None) -> StallMonitor:
        """Return a monitor that ends the run when a rank fails, or none progresses for ``limit_s`` seconds."""
        if self.rendezvous.world_size == 1:
            return StallMonitor(dist.HashStore(), 0, 1, None)
        store = dist.TCPStore(self.rendezvous.host, self.rendezvous.port, is_master=False)
        rank, world_size = self.rendezvous.rank, self.rendezvous.world_size
        return StallMonitor(store, rank, world_size, limit_s, on_failure=name_to_launcher)


def join_ranks(plan: ParallelPlan, device: torch.device, *, lays_out: bool = False) -> Ranks:
    """Join a run as one of its ranks, or alone; ``lays_out``: shard even a single process with an empty plan."""
    is_initialized = dist.is_initialized()
    num_ranks = dist.get_world_size() if is_initialized else int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == 1 and plan == ParallelPlan() and not lays_out:
        return Ranks(None, SINGLE_PROCESS, SINGLE_PROCESS, SINGLE_PROCESS, open_rendezvous())
    if device.type == "cpu" and not is_initialized:  # a state takes the GPU of the machine, if there is one
        join_process_group("gloo") if num_ranks > 1 else open_process_group("gloo")
    state = init_state_of(plan)
    main = state.of_section(MAIN)
    peers = loss_peers = meter_peers = GlooGroup() if state.num_ranks > 1 else SINGLE_PROCESS
    if len(main.groups("loss")[0]) < state.num_ranks:
        loss_peers = GlooGroup(state.all_groups("loss"))
        if main.size("tp") > 1 or len(state.sections) > 1:
            meter_peers = GlooGroup(state.all_groups("pp", "loss")) if main.size("pp") > 1 else loss_peers
    return Ranks(state, peers, loss_peers, meter_peers, open_rendezvous())
