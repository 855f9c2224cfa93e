"""Count one block of a foundation, and its ends, for one layout of a block: by two runs that differ in one block."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn

from omnitrain.data.packing.pack import Pack
from omnitrain.models.discovery.text_run import text_blocks
from omnitrain.models.foundation.runner import FoundationRunner
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.rank_meter import Collective, Op
from omnitrain.parallel.fake_world import fake_world, parallelize_in, plan_alone
from omnitrain.plan.schedule.actions import Kind
from omnitrain.recipe.parallel import ParallelPlan
from omnitrain.train.planning.rank_run import RankRun, run_rank

Work = Mapping[Op | Collective, int]
_FEW = 2  # blocks of each kind in the smaller run: FSDP gathers one while another one computes


@dataclass(frozen=True)
class Part:
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

    blocks: tuple[Part, ...]
    ends: Part
    transient: float
    shards: int


def kinds_of_blocks(model: OmniModel) -> list[int]:
    """Return for each block of the foundation the number of its kind: of one class, shapes and pattern of attention."""
    kinds: dict[object, int] = {}
    return [kinds.setdefault(_kind(block), len(kinds)) for block in text_blocks(model.foundation)]


def _kind(block: nn.Module) -> object:
    shapes = tuple((name, tuple(weight.shape)) for name, weight in block.named_parameters())
    patterns = [getattr(part, "sliding_window", None) for part in block.modules()]
    return type(block), shapes, tuple(pattern for pattern in patterns if isinstance(pattern, int))


def with_blocks(model: OmniModel, kept: list[int]) -> OmniModel:
    """Return a copy of a model on the meta device with these blocks of its foundation alone."""
    assert model.runner is not None
    blocks = text_blocks(model.foundation)
    everything = list(blocks)
    try:
        del blocks[:]
        blocks.extend([everything[index] for index in kept])
        few = copy.deepcopy(model)
        few.runner = FoundationRunner(few.foundation, model.runner.contract)  # it knows parameters by name
        return few
    finally:
        del blocks[:]
        blocks.extend(everything)


def count_cell(
    model: OmniModel, plan: ParallelPlan, num_ranks: int, packs: list[Pack], mixed_precision: bool | None
) -> Cell:
    """Count the parts of a model under ``plan`` on ``num_ranks`` ranks, without a pipeline.

    ``model``: on the meta device, and unchanged. ``packs``: of one rank, in a step.
    """
    kinds = kinds_of_blocks(model)
    numbers = sorted(set(kinds))
    few = {kind: [i for i, k in enumerate(kinds) if k == kind][:_FEW] for kind in numbers}
    base = sorted(chain.from_iterable(few.values()))
    small = _run(with_blocks(model, base), plan, num_ranks, packs, mixed_precision)
    parts = {}
    for kind in numbers:
        more = [i for i, k in enumerate(kinds) if k == kind]
        added = more[len(few[kind])] if len(more) > len(few[kind]) else None
        if added is not None:
            large = _run(with_blocks(model, sorted([*base, added])), plan, num_ranks, packs, mixed_precision)
            parts[kind] = _difference(large, small)
        else:
            less = [i for i in base if i != few[kind][-1]]
            parts[kind] = _difference(small, _run(with_blocks(model, less), plan, num_ranks, packs, mixed_precision))
    ends = _whole(small.run)
    for index in base:
        ends = _minus(ends, parts[kinds[index]])
    backward = next(run for run in small.run.actions if run.action.kind is Kind.B)
    return Cell(tuple(parts[kind] for kind in kinds), ends, backward.end.peak - backward.alive, small.shards)


@dataclass(frozen=True)
class _Counted:
    run: RankRun
    shards: int


def _run(
    model: OmniModel, plan: ParallelPlan, num_ranks: int, packs: list[Pack], mixed_precision: bool | None
) -> _Counted:
    with fake_world(num_ranks) as mode:
        state = parallelize_in(mode, model, plan, mixed_precision)
        batch = plan_alone(model, packs)
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
        return _Counted(run_rank(model, batch, optimizer, mode), state.size("fsdp"))


def _whole(run: RankRun) -> Part:
    """The first micro-batch of a run as one part."""
    forward = next(one for one in run.actions if one.action.kind is Kind.F)
    backward = next(one for one in run.actions if one.action.kind is Kind.B)
    return Part(
        run.weights,
        run.gradients,
        run.optimizer,
        forward.end.alive - forward.alive,
        forward.end.work,
        backward.end.work,
    )


def _difference(large: _Counted, small: _Counted) -> Part:
    return _minus(_whole(large.run), _whole(small.run))


def _minus(left: Part, right: Part) -> Part:
    return Part(
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
