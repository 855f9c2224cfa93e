"""Train three steps under one layout, on one process or many ranks, and return loss, gradients and weights."""

from __future__ import annotations

import resource
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omnitrain.data.packing.budget import pack_all
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.encode import idle_prompt
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.collectives import gathered_objects
from omnitrain.ops.experts.routing_replay import Recording, Replayed
from omnitrain.ops.experts.weights import experts_in
from omnitrain.optim.adamw import gradient_shard, local_shard
from omnitrain.optim.offload import OffloadedOptimizer
from omnitrain.parallel.layout import ModelLayout, layout_of
from omnitrain.parallel.pipeline.apply import whole_over_stages
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.step.plan import step_planner
from omnitrain.torch_private import COLLECTIVES, TorchDispatchMode

STEPS = 3
_LEARNING_RATE, _MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class Outcome:
    """The results of one layout, as full tensors on the CPU."""

    loss: float  # loss of the first step
    gradients: dict[str, Tensor]  # parameter name -> its gradient in the first step
    weights: dict[str, Tensor]  # parameter name -> its weight after three steps of SGD with momentum
    moved: dict[str, Tensor]  # parameter name -> the difference of its weights after and before training
    peak_memory_mb: float  # peak memory of this process, MiB
    collectives: int  # number of collectives that this rank issued in the first step
    # a recording of the experts' routing per step; None if another run's was replayed, or without experts
    routing: tuple[Recording, ...] | None = None
    # number of decisions that the replay changed, summed over the ranks
    replayed: Replayed = field(default_factory=Replayed)


def micro_batches(model: OmniModel, batch: list[Sample], ranks: int, accumulation: int) -> list[list[Pack]]:
    """Return the packs of every data-parallel rank, equally many; idle packs fill up ranks with fewer samples."""
    runner = model.runner
    idle = [idle_prompt(model)]
    table = []
    for rank in range(ranks):
        drawn = [batch[rank::ranks][start::accumulation] or idle for start in range(accumulation)]
        alone, capacity = not runner.contract.packs, sum(map(len, [*batch, *idle]))
        table.append([pack for samples in drawn for pack in pack_all(samples, capacity, alone=alone)])
    longest = max(map(len, table))
    return [packs + [Pack.from_samples(idle)] * (longest - len(packs)) for packs in table]


def train(
    model: OmniModel, packs: list[Pack], routing: tuple[Recording, ...] | None = None, steps: int = STEPS
) -> Outcome:
    """Train on this rank's packs, and replay ``routing``, a recording per step; None: route tokens, and record it."""
    planner = step_planner(model)
    batches = [planner(packs) for _ in range(steps)]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    layout = layout_of(model)
    whole = partial(_whole, layout=layout)
    before = whole(trained)
    optimizer = _optimizer(model, list(trained.values()))
    gradients: dict[str, Tensor] = {}
    first_loss, collectives = 0.0, 0
    routed = _Routing(model, routing)
    for step in range(steps):
        counted = _Collectives() if step == 0 and layout is not None else None
        with counted or nullcontext():
            is_ahead = layout is not None and layout.encodes_ahead and step + 1 < steps
            loss = accumulate_gradients(
                model,
                batches[step],
                forward_context=partial(routed.forward_context, step),
                upcoming=batches[step + 1] if is_ahead else None,
            ).item()
        if step == 0:
            first_loss, collectives = _summed(loss), 0 if counted is None else counted.count
            gradients = whole({name: parameter.grad for name, parameter in trained.items()})
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    weights = whole(trained)
    moved = {name: weight - before[name] for name, weight in weights.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Outcome(first_loss, gradients, weights, moved, peak, collectives, routed.recordings, routed.everywhere())


class _Routing:
    """Record the routing of experts, or replay another run's routing."""

    def __init__(self, model: OmniModel, replayed: tuple[Recording, ...] | None) -> None:
        self._model, self._replayed = model, replayed
        has_experts = any(True for _ in experts_in(model))
        self.recordings = tuple(Recording() for _ in range(STEPS)) if has_experts and replayed is None else None
        self._changed: list[Replayed] = []

    @contextmanager
    def forward_context(self, step: int, encoded: EncodedPack) -> Iterator[None]:
        """Wrap the forward of a micro-batch."""
        info = encoded.pack.info
        rows = None if encoded.sequence_slice is None else encoded.sequence_slice.positions
        if self._replayed is not None:
            with self._replayed[step].replayed(self._model, info.ids, info.lengths, rows) as changed:
                self._changed.append(changed)
                yield
        elif self.recordings is not None:
            with self.recordings[step].recorded(self._model, info.ids, info.lengths, rows):
                yield
        else:
            yield

    def everywhere(self) -> Replayed:
        """Return the number of changed decisions, summed over the ranks of the loss group."""
        totals = [sum(int(getattr(changed, name)) for changed in self._changed) for name in ("near_ties", "others")]
        layout = layout_of(self._model)
        tp = 1 if layout is None else layout.state.size("tp")  # tensor parallel ranks make the same decisions
        return Replayed(*(round(_summed(total) / tp) for total in totals))


def _optimizer(model: OmniModel, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    make = partial(ShardedSGD, lr=_LEARNING_RATE, momentum=_MOMENTUM)
    layout = layout_of(model)
    offloaded: Collection[nn.Parameter] = layout.offloaded(model) if layout is not None else ()
    groups = [{"params": parameters}]
    return OffloadedOptimizer(make, groups, offloaded) if offloaded else make(groups)


class _Collectives(TorchDispatchMode):
    """Counts the collectives that this rank issues, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in COLLECTIVES
        return func(*args, **(kwargs or {}))


def _summed(value: float) -> float:
    """Sum over all ranks."""
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def _whole(values: Mapping[str, Tensor | None], layout: ModelLayout | None) -> dict[str, Tensor]:
    """Return the whole tensors, on all ranks; without those that are None."""
    if layout is None or not layout.sections:
        parts = [whole_over_stages(values, None if layout is None else layout.pipeline)]
    else:
        own = {name for each in layout.components.values() if layout.holds(each.name) for name in each.parameters}
        whole = whole_over_stages({name: value for name, value in values.items() if name in own}, layout.pipeline)
        parts = gathered_objects(whole if layout.state.rank == layout.state.first_rank else {})
    return {name: value for part in parts for name, value in part.items() if value is not None}


class ShardedSGD(torch.optim.Optimizer):
    """``torch.optim.SGD`` on each rank's shards as plain tensors: DTensor takes longer than a small model's steps."""

    def __init__(self, params: Iterable[nn.Parameter] | list[dict[str, Any]], lr: float, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = gradient_shard(parameter.grad, parameter)
                if group["momentum"]:
                    state = self.state[parameter]
                    if "momentum_buffer" in state:
                        direction = state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
                    else:
                        direction = state["momentum_buffer"] = direction.clone()
                local_shard(parameter).add_(direction, alpha=-group["lr"])
