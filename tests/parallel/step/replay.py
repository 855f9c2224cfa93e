"""Compares the collectives that a rank ran in a step with those that its plan implies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.utils._python_dispatch import TorchDispatchMode

import omnitrain as ot
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.plan import StepPlan
from omnitrain.recipe.parallel import FOUNDATION
from tests.plan.implied_collectives import implied_collectives

_KINDS = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "exchange",
}


@dataclass(frozen=True)
class Event:
    """One collective.

    Attributes:
        micro_batch: in which.
        phase: ``forward`` or ``backward``.
        kind: ``gather``, ``reduce_scatter``, ``all_reduce`` or ``exchange``.
        unit: name of the module whose parameters move; empty: items move.
    """

    micro_batch: int
    phase: str
    kind: str
    unit: str


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.unit = ""
        self._now = Event(0, "forward", "", "")

    def note(self, *, micro_batch: int | None = None, phase: str | None = None, **_: Any) -> None:
        number = self._now.micro_batch if micro_batch is None else micro_batch
        self._now = replace(self._now, micro_batch=number, phase=phase or self._now.phase)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__
            kind = _KINDS.get(name, name)
            self.events.append(replace(self._now, kind=kind, unit="" if kind == "exchange" else self.unit))
        return func(*args, **(kwargs or {}))


class _Attributed:
    """Buffers are asked for right before the collectives of a unit, also where it has none but an all-reduce."""

    def __init__(self, recorder: _Recorder, unit: str) -> None:
        self._recorder, self._unit = recorder, unit

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._recorder.unit = self._unit
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Attributed, DefaultAllGather): ...


class _Reduce(_Attributed, DefaultReduceScatter): ...


def record(model: ot.OmniModel, batch: StepBatch) -> list[Event]:
    """Forward and backward of a step, and the collectives that they issued."""
    recorder = _Recorder()
    for component in layout_of(model).components.values():
        for unit in component.units:
            module = model.get_submodule(unit)
            module.set_custom_all_gather(_Gather(recorder, unit))
            module.set_custom_reduce_scatter(_Reduce(recorder, unit))
    with recorder:
        accumulate_gradients(model, batch, on_phase=recorder.note)
    return recorder.events


def differences(plan: StepPlan, rank: int, units: Mapping[str, tuple[str, ...]], events: list[Event]) -> list[str]:
    """Where what ran is not what the plan implies, in words.

    Three comparisons, each of whole sequences: the forward; the backward's exchanges and gathers of blocks; and the
    collectives of each unit, with its reductions. In the backward FSDP gathers outermost units ahead, those of frozen
    components for nothing: these are left out.

    Args:
        plan: of the step.
        rank: that recorded.
        units: component -> its units, the outermost one last.
        events: as recorded.
    """
    implied = list(_expanded(plan, rank, units))
    outermost = {own[-1] for own in units.values()}
    frozen = {units[component.name][-1] for component in plan.topology.components if not component.is_trained}
    events = [e for e in events if not (e.phase == "backward" and e.kind == "gather" and e.unit in frozen)]
    found = []
    for micro_batch in range(plan.num_micro_batches):
        both = [[e for e in side if e.micro_batch == micro_batch] for side in (implied, events)]
        forwards = [[e for e in side if e.phase == "forward"] for side in both]
        backwards = [
            [e for e in side if e.phase == "backward" and e.kind in ("gather", "exchange") and e.unit not in outermost]
            for side in both
        ]
        found += _unequal(f"micro-batch {micro_batch}, forward", *forwards)
        found += _unequal(f"micro-batch {micro_batch}, backward", *backwards)
        for unit in sorted({e.unit for side in both for e in side}):
            found += _unequal(
                f"micro-batch {micro_batch}, {unit or 'items'}", *([e for e in side if e.unit == unit] for side in both)
            )
    return found


def _expanded(plan: StepPlan, rank: int, units: Mapping[str, tuple[str, ...]]) -> Iterator[Event]:
    """Unit by unit. In a backward, an outermost unit is gathered once, before its last call, and then kept.

    The foundation's is kept since the forward: for good in a step without a backward.
    """
    done = set()
    for collective in implied_collectives(plan, rank):
        number, component = collective.micro_batch, collective.component
        *blocks, outermost = units[component]
        if collective.kind == "unshard":
            is_kept = component == FOUNDATION and number > 0 and not any(plan.loss_counts.values())
            yield from (Event(number, "forward", "gather", unit) for unit in ([] if is_kept else [outermost]))
            yield from (Event(number, "forward", "gather", unit) for unit in blocks)
        elif collective.kind == "unshard_again":
            is_kept = component == FOUNDATION or (number, component) in done
            done.add((number, component))
            yield from (Event(number, "backward", "gather", unit) for unit in ([] if is_kept else [outermost]))
            yield from (Event(number, "backward", "gather", unit) for unit in reversed(blocks))
        elif collective.kind in ("exchange", "exchange_back"):
            yield Event(number, "forward" if collective.kind == "exchange" else "backward", "exchange", "")
        else:
            yield from (Event(number, "backward", collective.kind, unit) for unit in (outermost, *blocks))


def _unequal(where: str, implied: list[Event], recorded: list[Event]) -> list[str]:
    for index, (planned, ran) in enumerate(zip_longest(implied, recorded)):
        if planned != ran:
            return [f"{where}, collective {index}: planned {_shown(planned)}, ran {_shown(ran)}"]
    return []


def _shown(event: Event | None) -> str:
    return "none" if event is None else f"{event.kind} {event.unit}".strip()
