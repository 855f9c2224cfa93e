"""Choose a layout: those that the model and the ranks allow, each with what a step takes, or why it is out.

The search goes through all of them by a lower bound of their seconds, the least first, and ends when the bound is above
what was found.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.omni.encode import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.weights import experts_in, num_experts_of
from omnitrain.parallel.resolve import resolve_without_ranks
from omnitrain.parallel.state import ParallelState
from omnitrain.parallel.step.plan import facts_of
from omnitrain.plan.tables import MicroBatchFacts
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan, ParallelPlan, Section
from omnitrain.recipe.plan_groups import PipelineSchedule
from omnitrain.train.planning.cells import count_cell
from omnitrain.train.planning.devices import Device
from omnitrain.train.planning.encoding import Encoding, count_encoder
from omnitrain.train.planning.estimate import Estimate, PlacedPlan, PricedCell, StepEstimate
from omnitrain.train.planning.rank_run import Training, predict_rank

_RECOMPUTE = ("none", "selective", "full")
_HEADROOM = 0.95  # share of a device's memory that a layout may take: allocators and libraries need the rest
_STAGES = 16  # most pipeline ranks that are tried


@dataclass(frozen=True)
class Candidate:
    """A layout, and what became of it.

    Attributes:
        degrees: axis -> degree, of those above 1, ``recompute``, and where encoders run.
        plan: the plan that has them.
        found: the estimate; None: it was not estimated.
        reason: why it is out; empty: it is not.
        counted: bytes of the fullest rank in the real build; None: it was not built.
    """

    degrees: Mapping[str, Any]
    plan: ParallelPlan
    found: Estimate | None = None
    reason: str = ""
    counted: int | None = None

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank: counted in the real build, or else estimated."""
        return self.counted or (self.found.peak if self.found else 0)

    @property
    def seconds(self) -> float:
        """Of a step, as estimated; infinite if it was not."""
        return self.found.seconds if self.found else math.inf

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
        slower: those that were not estimated: a lower bound of their seconds is above what was found.
    """

    fitting: list[Candidate] = field(default_factory=list)
    rejected: list[Candidate] = field(default_factory=list)
    refused: list[Candidate] = field(default_factory=list)
    slower: list[Candidate] = field(default_factory=list)

    def add(self, judged: Candidate) -> None:
        """Put a candidate where it belongs."""
        if judged.found is None:
            self.refused.append(judged)
        else:
            (self.rejected if judged.reason else self.fitting).append(judged)
            self.fitting.sort(key=lambda one: one.seconds)


_SIZES = {"tp": "tp", "cp": "cp", "ulysses": "sp", "pp": "pp", "ep": "ep"}  # degree of a candidate -> axis of a state
_PLACES = ("section", "encoders")


def steps_apart(left: Candidate, right: Candidate) -> int:
    """Return in how many steps one layout becomes the other: a degree times 2, the next recompute, another place."""
    steps = sum(abs(_exponent(left, axis) - _exponent(right, axis)) for axis in _SIZES)
    moved = any(left.degrees.get(place) != right.degrees.get(place) for place in _PLACES)
    return steps + abs(_recomputed(left) - _recomputed(right)) + moved


def _exponent(candidate: Candidate, axis: str) -> int:
    return int(candidate.degrees.get(axis, 1)).bit_length()


def _recomputed(candidate: Candidate) -> int:
    mode = str(candidate.degrees.get("recompute", "none")).removeprefix("recompute-")
    return _RECOMPUTE.index(mode) if mode in _RECOMPUTE else len(_RECOMPUTE)


class Planner:
    """Estimates layouts of a model on ``num_ranks`` devices.

    Args:
        training: what each rank trains. If its pack has media, only encoders may have them.
        plan: the user's plan; what it sets beside degrees, recompute and the place of encoders stays.
        device: of each rank.
        num_ranks: their number.
        packs_per_step: of all ranks.
        drawn: packs of the data, which a step has in turn; empty: that of ``training``.
    """

    def __init__(
        self,
        training: Training,
        plan: ParallelPlan,
        device: Device,
        num_ranks: int,
        packs_per_step: int,
        drawn: Sequence[MicroBatchFacts] = (),
    ) -> None:
        self._plan = plan.model_copy(update={"auto": False})
        self._model, self._as_built = training.model, training
        pack, model = training.pack, training.model
        self._packs = drawn or [facts_of(pack, model.runner.apart)]
        listed = {medium for facts in self._packs for medium, items in facts.items.items() if items}
        used = [name for name, media in model.media_names.items() if listed.intersection(media)]
        self.encodings: dict[str, Encoding] = {}
        if not pack.targets:  # otherwise decoders, and the encoders with them, are counted with the foundation
            self.encodings = {name: count_encoder(training, plan, name) for name in used}
            training = replace(training, pack=text_pack(model, pack.info.lengths)) if pack.inputs else training
        self._training = training
        self._cells: dict[tuple[Any, ...], PricedCell] = {}
        self._place(device, num_ranks, packs_per_step)

    def _place(self, device: Device, num_ranks: int, packs_per_step: int) -> None:
        self._device, self._num_ranks, self._packs_per_step = device, num_ranks, packs_per_step
        self._drawn = [self._packs[index % len(self._packs)] for index in range(packs_per_step)]
        self._encodes = self._seconds_encoding()

    def on(self, num_ranks: int, packs_per_step: int) -> Planner:
        """Return the planner of other numbers, with all that is counted already."""
        other = copy.copy(self)
        other._place(self._device, num_ranks, packs_per_step)
        return other

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
        for sequence in _powers(self._num_ranks):
            yield from self.of_sequence(sequence)

    def search(self, top: int = 1, *, is_counted: bool = False) -> Search:
        """Find the ``top`` fastest layouts; sequences are divided only if nothing else fits, or gives all packs.

        ``is_counted``: these fit in the real build.
        """
        found = Search()
        for sequence in _powers(self._num_ranks):
            self.joint(self.of_sequence(sequence), found, top)
            while is_counted and (one := next((one for one in found.fitting[:top] if not one.counted), None)):
                found.fitting.remove(one)
                found.add(self.counted(one))
                left, found.slower[:] = [*found.slower], []
                self.joint(left, found, top)
            if found.fitting:
                break
        return found

    def joint(self, candidates: Iterable[Candidate], found: Search, top: int) -> None:
        """Estimate candidates by their bounds, the least first, until none that is left can be among the fastest."""
        bounded = [(self.bound(candidate), candidate) for candidate in candidates]
        for judged, _ in bounded:
            if isinstance(judged, Candidate):
                found.add(judged)
        open_ = [(bound, candidate) for bound, candidate in bounded if not isinstance(bound, Candidate)]
        for bound, candidate in sorted(open_, key=lambda pair: pair[0].seconds):
            if len(found.fitting) >= top and bound.seconds >= found.fitting[top - 1].seconds:
                found.slower.append(replace(candidate, reason=f"slower: at least {bound.seconds:.3g} s a step"))
            elif bound.peak > self._limit:
                found.rejected.append(replace(candidate, found=bound, reason=self._too_much(bound.peak, "at least ")))
            else:
                found.add(self.judge(candidate))

    def judge(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its estimate, or with why it is out."""
        try:
            state, plans = resolve_without_ranks(
                self._model, candidate.plan, self._training.mixed_precision, self._num_ranks
            )
            if self._packs_per_step % state.size("dp"):
                return replace(candidate, reason=self._indivisible(state.size("dp")))
            found = self.estimate(PlacedPlan.of(self._model, candidate.plan, state, plans))
        except UserError as error:  # a pipeline may have more stages than the model has blocks
            return replace(candidate, reason=error.problems[0])
        return replace(candidate, found=found, reason=self._too_much(found.peak))

    def counted(self, judged: Candidate) -> Candidate:
        """Return an estimated layout with the peak of the real build, on the first and the last pipeline stage.

        Ranks of sections wait for messages of others, so that a layout with sections keeps what was estimated.
        """
        if judged.plan.sections or judged.found is None:
            return replace(judged, counted=round(judged.peak))
        trained, plan = self._as_built, judged.plan
        state, _ = resolve_without_ranks(self._model, plan, trained.mixed_precision, self._num_ranks)
        number = self._packs_per_step // state.size("dp")
        adds = number > 1 and state.size("pp") == 1  # a micro-batch is as any other, if gradients are there
        at_once = 1 if adds else min(number, _alive(plan, state))
        ends = sorted({0, self._num_ranks - 1} if state.size("pp") > 1 else {0})
        runs = (predict_rank(trained, plan, self._num_ranks, at_once, rank, adds=adds) for rank in ends)
        peak = max(run.peak for run in runs)
        return replace(judged, counted=peak, reason=self._too_much(peak))

    def estimate(self, layout: PlacedPlan) -> Estimate:
        """Estimate a layout that resolves."""
        priced = self._cell(layout.plan, layout.state)
        return StepEstimate(self._model, layout, priced, self.encodings, self._drawn).estimate()

    def of_sequence(self, sequence: int) -> Iterator[Candidate]:
        """Yield layouts whose sequences are divided over so many ranks."""
        default = {axis: 1 if getattr(self._plan.default, axis) else None for axis in _SIZES}
        for places in self._places():
            sections = [place for place in places.values() if isinstance(place, Section)]
            ranks = self._num_ranks - sum(one.ranks for one in (*self._plan.sections.values(), *sections))
            for named, recompute in product(self._degrees(ranks, sequence), _RECOMPUTE):
                plan = _with(self._plan, FOUNDATION, default | named | {"memory.recompute": recompute})
                mode = {} if recompute == "none" else {"recompute": f"recompute-{recompute}"}
                yield _placed(Candidate(named | mode or {"dp": ranks}, plan), places)

    def _degrees(self, ranks: int, sequence: int) -> Iterator[dict[str, Any]]:
        """Yield the degrees above 1 of layouts of so many ranks, which are all but those of sections."""
        experts = max((num_experts_of(experts) for _, experts in experts_in(self._model.foundation)), default=1)
        cp = self._plan.of(FOUNDATION).cp or 1
        for tp, pp, ep in product(_powers(min(self._device.per_node, 8)), _powers(_STAGES), _powers(experts)):
            if ranks > 0 and ranks % (tp * pp * sequence * cp) == 0 == ranks // (tp * pp) % ep:
                degrees = {"tp": tp, "cp": cp, "ulysses": sequence, "pp": pp, "ep": ep}
                yield {axis: degree for axis, degree in degrees.items() if degree > 1}

    def _places(self) -> Iterator[dict[str, Section | dict[str, Any]]]:
        """Yield what may be done with encoders: as the plan has them, on all ranks, or in a section."""
        yield {}
        if not self.encodings or self._plan.sections:
            return
        for window in (1, "step"):
            yield {name: {"place": "world", "encode.window": window} for name in self.encodings}
        for ranks in _powers(self._num_ranks // 2):
            yield {"encoders": Section(components=[*self.encodings], ranks=ranks)}

    @property
    def _limit(self) -> float:
        return self._device.memory * _HEADROOM

    def _too_much(self, peak: float, least: str = "") -> str:
        """Why a layout with this peak does not fit; empty: it does."""
        if peak <= self._limit:
            return ""
        return f"memory: {least}{peak / 2**30:.3g} of {self._limit / 2**30:.3g} GiB"

    def _indivisible(self, replicas: int) -> str:
        return (
            f"train.packs_per_step: found {self._packs_per_step}; expected a multiple of the {replicas} data-parallel "
            "ranks"
        )

    def bound(self, candidate: Candidate) -> Estimate | Candidate:
        """Return the least seconds and bytes that a layout can have, or the candidate with why it is out.

        A block on ``n`` ranks computes at least an n-th of what it computes on one, with experts on as many ranks: a
        rank with fewer experts multiplies as many rows, but reads fewer weights.
        """
        plan = candidate.plan.of(FOUNDATION)
        tp, pp, sequence = plan.tp or 1, plan.pp or 1, (plan.ulysses or 1) * (plan.cp or 1)
        of_sections = sum(section.ranks for section in candidate.plan.sections.values())
        main = self._num_ranks - of_sections
        replicas = main // (tp * pp * sequence)
        if not replicas:
            return self.judge(candidate)  # it says why
        if self._packs_per_step % replicas:
            return replace(candidate, reason=self._indivisible(replicas))
        number, one = self._packs_per_step // replicas, self._whole(candidate.plan)
        tokens = [sum(facts.lengths) for facts in self._drawn]
        filled = (fmean(tokens) if pp == 1 else min(tokens)) / max(tokens)
        work = sum(one.seconds) / (tp * sequence) * filled
        encodes = self._encodes
        on_main = 0.0 if of_sections or pp > 1 else encodes / main
        share = _share_of_busiest(pp, number, plan.schedule or PipelineSchedule())
        seconds = max(number * work / share + on_main, encodes / of_sections if of_sections else 0)
        parts = [*one.cell.blocks, one.cell.ends]
        static = sum(part.static for part in parts) * one.cell.shards / main
        kept = sum(part.kept for part in parts) / (tp * sequence * pp)
        return Estimate(seconds, memory={"weights": static, "activations": kept})

    def _seconds_encoding(self) -> float:
        """Seconds in which one rank encodes all items of a step, forward and backward."""
        total = 0.0
        for name, encoding in self.encodings.items():
            media = self._model.media_names[name]
            cost = sum(item.cost for facts in self._drawn for medium in media for item in facts.items.get(medium, ()))
            part = encoding.part
            seconds = self._device.seconds(part.forward).computed + self._device.seconds(part.backward).computed
            total += seconds / encoding.elements * cost
        return total

    def _whole(self, plan: ParallelPlan) -> PricedCell:
        """The cell of a block that no ranks share, but for experts."""
        return self._counted(_without(plan, ("tp", "ulysses", "cp", "ep")), 1, 1, plan.of(FOUNDATION).ep or 1)

    def _cell(self, plan: ParallelPlan, state: ParallelState) -> PricedCell:
        return self._counted(plan, state.size("tp"), state.size("sequence"), state.size("ep"))

    def _counted(self, plan: ParallelPlan, tp: int, sequence: int, ep: int) -> PricedCell:
        """Count, once, the layout of a block: twice data parallel, without a pipeline."""
        foundation, stands = plan.of(FOUNDATION), standing(sequence, ep)
        key = (tp, foundation.cp, foundation.ulysses, stands, str(foundation.memory), str(foundation.experts))
        if key not in self._cells:
            alone = _without(plan, ("pp", "schedule", "dp_shard", "dp_replicate", "mode"))
            alone = _with(alone, FOUNDATION, {"ep": stands} if ep > 1 else {})
            ranks = tp * 2 * max(sequence, stands)
            state, _ = resolve_without_ranks(self._model, alone, self._training.mixed_precision, ranks)
            cell = count_cell(self._training, alone, ranks)
            encoders, ends = [encoding.part for encoding in self.encodings.values()], cell.ends
            weights = ends.weights - sum(part.weights for part in encoders) / cell.shards
            optimizer = ends.optimizer - sum(part.optimizer for part in encoders) / cell.shards
            ends = replace(ends, weights=weights, optimizer=optimizer)  # a text leaves no gradients of encoders
            self._cells[key] = PricedCell(replace(cell, ends=ends), self._device, state)
        return self._cells[key]


def standing(sequence: int, ep: int) -> int:
    """Return the number of ranks of experts that is counted for ``ep``: another one than any other axis has.

    Experts on any number of ranks do the same for as many tokens.
    """
    return 2 * sequence if ep > 1 else 1


def text_pack(model: OmniModel, lengths: Sequence[int]) -> Pack:
    """Return a pack of texts of these lengths, all of whose tokens are trained."""
    texts = (idle_prompt(model, length) for length in lengths)
    return Pack.from_samples([replace(text, loss_mask=np.ones(len(text.input_ids), bool)) for text in texts])


def _alive(plan: ParallelPlan, state: ParallelState) -> int:
    """The fewest micro-batches of a step that reach the most live activations of its schedule, beside gradients."""
    schedule, stages = plan.of(FOUNDATION).schedule or PipelineSchedule(), state.size("pp")
    return stages + 1 if schedule.resolved_kind == "1f1b" else 2 * stages


def _share_of_busiest(stages: int, number: int, schedule: PipelineSchedule) -> float:
    """The work of a step's micro-batches over the least time in which pipeline ranks can run them.

    In 1F1B and GPipe, with stages of work ``w``, stage ``r`` ends at ``w_0 + ... + w_(r-1) + number * w_r`` at best,
    and this is the least maximum of these. In others, a rank need not wait for all that is before a stage of its own.
    """
    if schedule.resolved_kind not in ("gpipe", "1f1b"):
        return stages
    return number * (1 - (1 - 1 / number) ** stages) if stages > 1 else 1.0


def _placed(candidate: Candidate, places: Mapping[str, Section | Mapping[str, Any]]) -> Candidate:
    """The candidate with encoders at other places: component -> values of its plan, or section -> it."""
    plan, degrees = candidate.plan, dict(candidate.degrees)
    for name, place in places.items():
        if isinstance(place, Section):
            plan = plan.model_copy(update={"sections": {name: place}})
            degrees |= {"section": f"+section{place.ranks}"}
        else:
            plan = _with(plan, name, place)
            degrees |= {"encoders": f"world-{place['encode.window']}"}
    return replace(candidate, plan=plan, degrees=degrees)


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]


def _with(plan: ParallelPlan, component: str, values: Mapping[str, Any]) -> ParallelPlan:
    """The plan with these values of a component."""
    own = plan.components.get(component, ComponentPlan())
    return plan.model_copy(update={"components": {**plan.components, component: own.changed(values)}})


def _without(plan: ParallelPlan, keys: Iterable[str]) -> ParallelPlan:
    """The plan without these keys of the foundation, its own and those it inherits, and without sections."""
    nothing = dict.fromkeys(keys)
    plan = plan.model_copy(update={"default": plan.default.changed(nothing), "sections": {}})
    return _with(plan, FOUNDATION, nothing)
