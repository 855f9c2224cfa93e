"""Choose how many micro-batches an encoder encodes together: within a limit of bytes, in the shortest time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from omnitrain.errors import UserError
from omnitrain.plan.placement import Placement, Topology
from omnitrain.plan.schedule.actions import ENCODES, Action, Kind, Schedule
from omnitrain.plan.schedule.encoders import with_encoders
from omnitrain.plan.schedule.simulate import simulate
from omnitrain.plan.schedule.table import only_passes
from omnitrain.plan.step import plan_step
from omnitrain.plan.tables import StepTables


@dataclass(frozen=True)
class WindowChoice:
    """The facts that decide the windows of a component."""

    component: str  # name of an encoder that is encoded outside of the forwards
    # number of micro-batches in a window, or ``step`` for all of them; ``auto`` for the number with which the simulated
    # step is the shortest. A limit may make it smaller
    window: int | Literal["step", "auto"]
    bytes_per_feature: int  # bytes of one feature, with all of its tensors
    max_bytes: int | None  # the most bytes of features and their gradients that wait on a rank; None: no limit

    @property
    def is_fixed(self) -> bool:
        """Whether every step has the same window."""
        return self.window != "auto" and self.max_bytes is None


class WindowChooser:
    """Choose the windows of each step, equally on all ranks.

    ``choices``: components whose windows depend on the step. ``num_parameters``: component -> active parameters per
    token, from which ``auto`` estimates times.
    """

    def __init__(self, choices: Sequence[WindowChoice], num_parameters: Mapping[str, int]) -> None:
        self.choices, self.num_parameters = tuple(choices), dict(num_parameters)

    def __call__(self, topology: Topology, tables: StepTables) -> Topology:
        """Return the topology with the windows of this step; UserError: a micro-batch's features are above a limit."""
        number = len(tables.counts)
        for choice in self.choices if number else ():
            passes = only_passes(topology.pipeline, number)
            features = features_of(topology, tables, choice.component)
            sizes = _sizes(number, choice)
            if choice.max_bytes is not None:
                is_trained = topology.component(choice.component).is_trained
                peaks = {size: choice.bytes_per_feature * peak(passes, size, is_trained, features) for size in sizes}
                sizes = [size for size in sizes if peaks[size] <= choice.max_bytes]
                if not sizes:
                    raise UserError(_too_small(topology, tables, choice, features, min(peaks.values())))
            if choice.window == "auto":
                seconds = {size: self._seconds(topology, tables, choice.component, size) for size in sizes}
                size = min(sizes, key=lambda size: (seconds[size], -size))
            else:
                size = max(sizes)
            topology = _with_window(topology, choice.component, size)
        return topology

    def _seconds(self, topology: Topology, tables: StepTables, component: str, size: int) -> float:
        """Estimate the time of a step, in operations: parameters times tokens, and twice as many in a backward."""
        passes = only_passes(topology.pipeline, len(tables.counts))
        planned = _with_window(topology, component, size)
        loads = plan_step(planned, tables).loads(component).max(axis=1)
        items = topology.items_of(component, tables.slot)
        tokens, costs = tables.item_tokens[items].sum(), tables.cost[items].sum()
        encodes = self.num_parameters[component] * tokens / max(1, costs) * loads
        reads = next(c.name for c in topology.components if c.reads_packs)
        forwards = self.num_parameters[reads] / passes.num_stages * tables.tokens.max(axis=1)

        def seconds(action: Action) -> float:
            if action.kind is Kind.EXCHANGE:
                return 0.0
            operations = encodes if action.kind in ENCODES else forwards
            is_whole_backward = action.kind in (Kind.B, Kind.ENCODE_B)
            return float(operations[_first(action)]) * (1 + is_whole_backward)

        return float(simulate(with_encoders(passes, [planned.component(component)]), seconds).makespan)


def features_of(topology: Topology, tables: StepTables, component: str) -> np.ndarray:
    """Return ``[M, ranks]`` int64: the features of a component that the samples of each rank have."""
    items = topology.items_of(component, tables.slot)
    cell = tables.slot[items] // len(topology.media) * topology.world_size + tables.owner[items]
    number = len(tables.counts)
    sums = np.bincount(cell, tables.item_tokens[items], number * topology.world_size)
    return sums.astype(np.int64).reshape(number, -1)


def peak(passes: Schedule, size: int, is_trained: bool, features: np.ndarray) -> int:
    """Return the most ``features`` that wait on a first stage's rank, from their exchange to their last backward."""
    return int((_waiting(passes, size, is_trained) @ features).max())


@lru_cache(maxsize=256)
def _waiting(passes: Schedule, size: int, is_trained: bool) -> np.ndarray:
    """Return ``[exchanges, M]`` bool: the micro-batches whose features wait after each exchange."""
    encoder = Placement("", (), window=size, is_trained=is_trained)
    row = with_encoders(passes, [encoder]).actions[passes.stage_ranks[0]]
    waiting, found = np.zeros(passes.num_micro_batches, dtype=bool), []
    for action in row:
        if action.kind is Kind.EXCHANGE:
            waiting[_first(action) : _first(action) + size] = True
            found.append(waiting.copy())
        elif action.kind is Kind.ENCODE_B:
            waiting[_first(action) : _first(action) + size] = False
        elif not is_trained:
            done = [part for part in action.passes if part.stage == 0 and part.kind in (Kind.B, Kind.I)]
            waiting[[_first(part) for part in done]] = False
    return np.array(found)


def _first(action: Action) -> int:
    """Its micro-batch, or the first one of its window."""
    assert action.micro_batch is not None
    return action.micro_batch


def _sizes(number: int, choice: WindowChoice) -> list[int]:
    """The sizes to choose from: of those with equally many windows, the smallest."""
    most = number if isinstance(choice.window, str) else min(choice.window, number)
    even = {-(-number // windows) for windows in range(1, number + 1)}
    return sorted({size for size in even if size <= most} | {most})


def _with_window(topology: Topology, component: str, size: int) -> Topology:
    components = (replace(c, window=size) if c.name == component else c for c in topology.components)
    return replace(topology, components=tuple(components))


def _too_small(topology: Topology, tables: StepTables, choice: WindowChoice, features: np.ndarray, needed: int) -> str:
    found = f"parallel.components.{choice.component}.encode.feature_bytes: found {choice.max_bytes:,}"
    largest = int(tables.item_tokens[topology.items_of(choice.component, tables.slot)].max())
    bytes_ = choice.bytes_per_feature * largest
    if bytes_ > (choice.max_bytes or 0):
        of_item = f"{largest:,} features of {choice.bytes_per_feature:,} bytes: {bytes_:,} bytes"
        return f"{found}, but one item has {of_item}; allow at least as many, or make items smaller"
    micro_batch, rank = np.unravel_index(features.argmax(), features.shape)
    return (
        f"{found}, but with windows of one micro-batch {needed:,} bytes wait on a rank at a time (rank {rank} has "
        f"{features.max():,} features of {choice.bytes_per_feature:,} bytes in micro-batch {micro_batch}); allow "
        f"{needed:,}, or make micro-batches smaller"
    )
