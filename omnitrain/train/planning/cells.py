"""Count one block of a foundation, and its ends, for one layout of a block: by two runs that differ in one block."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from omnitrain.models.discovery.text_run import kind_of_block, text_blocks
from omnitrain.models.foundation.runner import FoundationRunner
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.rank_meter import Collective, Op
from omnitrain.plan.schedule.actions import Kind
from omnitrain.recipe.parallel import ParallelPlan
from omnitrain.train.planning.rank_run import RankRun, Training, predict_rank

Work = Mapping[Op | Collective, int]


@dataclass(frozen=True)
class CountedPart:
    """What a part of a model holds and does in a micro-batch on one rank; sizes in bytes.

    Attributes:
        weights: sharded over the ranks of the cell, as are the gradients and the state of the optimizer.
        kept: by the forward, for the backward.
        forward: its work, and that of the backward.
    """

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    kept: float = 0
    forward: Work = field(default_factory=dict, repr=False)
    backward: Work = field(default_factory=dict, repr=False)

    @property
    def static(self) -> float:
        """Bytes that it holds all the time."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Cell:
    """The parts of a model in one layout of a block.

    Attributes:
        blocks: for each block of the foundation, its part.
        ends: all else: embeddings, head, loss, encoders and decoders.
        transient: the most bytes that a backward needs besides: gathered weights, recomputed activations.
        shards: number of ranks over which the cell shards parameters.
    """

    blocks: tuple[CountedPart, ...]
    ends: CountedPart
    transient: float
    shards: int


def kinds_of_blocks(model: OmniModel) -> list[int]:
    """Return for each block of the foundation the number of its kind: of one class, shapes and pattern of attention."""
    kinds: dict[object, int] = {}
    return [kinds.setdefault(kind_of_block(block), len(kinds)) for block in text_blocks(model.foundation)]


def with_blocks(model: OmniModel, kept: list[int]) -> OmniModel:
    """Return a copy of a model on the meta device with these blocks of its foundation alone."""
    assert model.runner is not None
    blocks = text_blocks(model.foundation)
    everything = list(blocks)
    try:
        del blocks[:]
        blocks.extend([everything[index] for index in kept])
        few = copy.deepcopy(model)
        native, present = model.runner.native, {name for name, _ in few.foundation.named_parameters()}
        own = {name: tuple(path for path in paths if path in present) for name, paths in native.components.items()}
        native = replace(native, components=own)  # it knows parameters by name
        few.runner = FoundationRunner(few.foundation, model.runner.contract, native=native)
        return few
    finally:
        del blocks[:]
        blocks.extend(everything)


def count_cell(training: Training, plan: ParallelPlan, num_ranks: int) -> Cell:
    """Count the parts of a model under ``plan`` on ``num_ranks`` ranks, without a pipeline."""
    kinds = kinds_of_blocks(training.model)
    first = {kind: kinds.index(kind) for kind in set(kinds)}
    base = sorted(first.values())

    def counted(kept: list[int]) -> RankRun:
        return predict_rank(replace(training, model=with_blocks(training.model, kept)), plan, num_ranks, 1)

    small = counted(base)
    parts, runs = {}, [small]
    for kind, index in first.items():
        more = [i for i, k in enumerate(kinds) if k == kind][1:2]
        runs.append(counted(sorted([*base, *more]) if more else [i for i in base if i != index]))
        left, right = (runs[-1], small) if more else (small, runs[-1])
        parts[kind] = _minus(_whole(left), _whole(right))
    ends = _whole(small)
    for index in base:
        ends = _minus(ends, parts[kinds[index]])
    return Cell(tuple(parts[kind] for kind in kinds), ends, max(map(_transient, runs)), small.shards)


def _transient(run: RankRun) -> int:
    """The most bytes that the first backward needs besides what was there when it began."""
    backward = next(one for one in run.actions if one.action.kind is Kind.B)
    return backward.end.peak - backward.alive


def _whole(run: RankRun) -> CountedPart:
    """The first micro-batch of a run as one part."""
    forward = next(one for one in run.actions if one.action.kind is Kind.F)
    backward = next(one for one in run.actions if one.action.kind is Kind.B)
    return CountedPart(
        run.weights,
        run.gradients,
        run.optimizer,
        forward.end.alive - forward.alive - run.stays,
        forward.end.work,
        backward.end.work,
    )


def _minus(left: CountedPart, right: CountedPart) -> CountedPart:
    return CountedPart(
        left.weights - right.weights,
        left.gradients - right.gradients,
        left.optimizer - right.optimizer,
        left.kept - right.kept,
        _less(left.forward, right.forward),
        _less(left.backward, right.backward),
    )


def _less(left: Work, right: Work) -> Work:
    counted = Counter(left)
    counted.subtract(right)
    return {one: times for one, times in counted.items() if times}
