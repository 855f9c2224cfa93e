"""Choose a layout: those that the model and the ranks allow, each with what a step takes, or why it is out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from omnitrain.errors import UserError
from omnitrain.ops.experts.weights import experts_in, num_experts_of
from omnitrain.parallel.resolve import resolve_without_ranks
from omnitrain.parallel.state import ParallelState
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan, ParallelPlan
from omnitrain.train.planning.cells import Cell, count_cell
from omnitrain.train.planning.devices import Device
from omnitrain.train.planning.estimate import Estimate, estimate
from omnitrain.train.planning.rank_run import Training

_RECOMPUTE = ("none", "selective", "full")
_HEADROOM = 0.95  # share of a device's memory that a layout may take: allocators and libraries need the rest


@dataclass(frozen=True)
class Candidate:
    """A layout, and what became of it.

    Attributes:
        degrees: axis -> degree, of those above 1, and ``recompute``.
        plan: the plan that has them.
        found: the estimate; None: it was not estimated.
        reason: why it is out; empty: it is not.
    """

    degrees: Mapping[str, Any]
    plan: ParallelPlan
    found: Estimate | None = None
    reason: str = ""

    def __str__(self) -> str:
        return " ".join(
            f"{axis}{degree}" if isinstance(degree, int) else degree for axis, degree in self.degrees.items()
        )


@dataclass(frozen=True)
class Search:
    """All layouts that were looked at.

    Attributes:
        fitting: by the seconds of a token, the fastest first.
        rejected: those that do not fit the memory.
        refused: those that the model or the number of ranks does not allow.
    """

    fitting: list[Candidate] = field(default_factory=list)
    rejected: list[Candidate] = field(default_factory=list)
    refused: list[Candidate] = field(default_factory=list)


_SIZES = {"tp": "tp", "ulysses": "sp", "pp": "pp", "ep": "ep"}  # degree of a candidate -> axis of a state


def steps_apart(left: Candidate, right: Candidate) -> int:
    """Return in how many steps one layout becomes the other: a degree times 2, or the next recompute."""
    steps = sum(abs(_exponent(left, axis) - _exponent(right, axis)) for axis in _SIZES)
    return steps + abs(_recomputed(left) - _recomputed(right))


def _exponent(candidate: Candidate, axis: str) -> int:
    return int(candidate.degrees.get(axis, 1)).bit_length()


def _recomputed(candidate: Candidate) -> int:
    mode = str(candidate.degrees.get("recompute", "none")).removeprefix("recompute-")
    return _RECOMPUTE.index(mode) if mode in _RECOMPUTE else len(_RECOMPUTE)


class Planner:
    """Estimates layouts of a model on ``num_ranks`` devices.

    Args:
        training: what each rank trains.
        plan: the user's plan; what it sets beside degrees and recompute stays.
        device: of each rank.
        num_ranks: their number.
        packs_per_step: of all ranks.
    """

    def __init__(
        self, training: Training, plan: ParallelPlan, device: Device, num_ranks: int, packs_per_step: int
    ) -> None:
        self._training, self._plan, self._device, self._num_ranks = training, plan, device, num_ranks
        self._packs_per_step, self._model = packs_per_step, training.model
        self._cells: dict[tuple[Any, ...], Cell] = {}

    def own(self) -> Candidate:
        """Return the layout of the user's plan."""
        state, plans = resolve_without_ranks(self._model, self._plan, self._training.mixed_precision, self._num_ranks)
        sizes = {axis: state.size(of) for axis, of in _SIZES.items()}
        degrees: dict[str, Any] = {axis: size for axis, size in sizes.items() if size > 1}
        if (mode := plans[FOUNDATION].memory.mode) != "none":
            degrees["recompute"] = f"recompute-{mode}"
        return Candidate(degrees or {"dp": self._num_ranks}, self._plan)

    def candidates(self) -> Iterator[Candidate]:
        """Yield all layouts that the search may look at."""
        for sequence in self._powers(self._num_ranks):
            yield from self._candidates(sequence)

    def search(self, say: Callable[[str], None] = lambda _: None) -> Search:
        """Estimate all layouts. Sequences are divided only if nothing else fits or gives every rank a pack."""
        found = Search()
        for sequence in self._powers(self._num_ranks):
            candidates = list(self._candidates(sequence))
            for candidate in candidates:
                done = self.judge(candidate)
                kept = found.fitting if done.found and not done.reason else found.rejected
                (kept if done.found else found.refused).append(done)
            say(f"sequences over {sequence} ranks: {len(candidates)} layouts")
            if found.fitting:
                break
        found.fitting.sort(key=lambda one: one.found.seconds / one.found.tokens)  # type: ignore[union-attr]
        return found

    def judge(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its estimate, or with why it is out."""
        try:
            state, plans = resolve_without_ranks(
                self._model, candidate.plan, self._training.mixed_precision, self._num_ranks
            )
        except UserError as error:
            return Candidate(candidate.degrees, candidate.plan, reason=error.problems[0])
        replicas = state.size("dp")
        if self._packs_per_step % replicas:
            reason = f"{self._packs_per_step} packs of a step on {replicas} data-parallel ranks"
            return Candidate(candidate.degrees, candidate.plan, reason=reason)
        found = self.estimate(candidate.plan, state, plans[FOUNDATION])
        limit = self._device.memory * _HEADROOM
        reason = "" if found.peak <= limit else f"memory: {found.peak / 2**30:.1f} of {limit / 2**30:.1f} GiB"
        return Candidate(candidate.degrees, candidate.plan, found, reason)

    def estimate(self, plan: ParallelPlan, state: ParallelState, of_foundation: ComponentPlan) -> Estimate:
        """Estimate a plan that fits."""
        cell = self._cell(plan, state)
        each = self._packs_per_step // state.size("dp")
        tokens = int(self._training.pack.input_ids.numel())
        return estimate(self._model, of_foundation, state, cell, self._device, each, tokens)

    def _cell(self, plan: ParallelPlan, state: ParallelState) -> Cell:
        """Count, once, the layout of a block: as few ranks as it takes, twice data parallel, without a pipeline."""
        inside = {axis: state.size(axis) for axis in ("tp", "cp", "sp", "ep")}
        foundation = plan.of(FOUNDATION)
        key = (*inside.values(), str(foundation.memory), str(foundation.experts))
        if key not in self._cells:
            shards = max(2 * inside["cp"] * inside["sp"], inside["ep"])
            alone = _with(plan, {"pp": None, "schedule": None, "dp_shard": None, "dp_replicate": None, "mode": None})
            ranks = inside["tp"] * shards
            self._cells[key] = count_cell(self._training, alone, ranks)
        return self._cells[key]

    def _candidates(self, sequence: int) -> Iterator[Candidate]:
        """Yield layouts whose sequences are divided over so many ranks."""
        experts = max((number for number in self._numbers_of_experts()), default=1)
        inside = self._device.per_node
        for tp, pp, ep in product(self._powers(min(inside, 8)), self._powers(16), self._powers(experts)):
            if tp * pp * sequence > self._num_ranks or (ep > 1 and ep > self._num_ranks // (tp * pp)):
                continue
            for recompute in _RECOMPUTE:
                degrees = {"tp": tp, "ulysses": sequence, "pp": pp, "ep": ep}
                changes: dict[str, Any] = {axis: degree for axis, degree in degrees.items() if degree > 1}
                plan = _with(self._plan, changes | {"memory.recompute": recompute})
                named = dict(changes) if recompute == "none" else changes | {"recompute": f"recompute-{recompute}"}
                yield Candidate(named or {"dp": self._num_ranks}, plan)

    def _numbers_of_experts(self) -> Iterator[int]:
        for _, experts in experts_in(self._model.foundation):
            yield num_experts_of(experts)

    @staticmethod
    def _powers(most: int) -> list[int]:
        return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]


def _with(plan: ParallelPlan, values: Mapping[str, Any]) -> ParallelPlan:
    """The plan with these values of the foundation."""
    own = plan.components.get(FOUNDATION, ComponentPlan())
    return plan.model_copy(update={"components": {**plan.components, FOUNDATION: own.changed(values)}})
