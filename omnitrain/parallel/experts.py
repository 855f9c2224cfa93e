"""Expert parallelism: the experts of a layer are spread over ranks, and tokens go to them and back.

    experts     E0 E1 | E2 E3       rank 0 has the first half of every layer's experts, rank 1 the second
    rank 0      tokens that chose E2 or E3 go to rank 1, their results come back
    rank 1      tokens that chose E0 or E1 go to rank 0

Weights are DTensors ``Shard(0)`` on the mesh ``ep``, from before they are sharded by FSDP over ``ep_fsdp`` to the end,
so norms, optimizers and checkpoints need no case of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from omnitrain.models.omni import OmniModel
from omnitrain.ops.collectives import gather_rows
from omnitrain.ops.experts import (
    Routes,
    backend_of,
    combine_rows,
    experts_in,
    is_replaying,
    set_dispatcher,
    set_row_budget,
    sort_by_expert,
    take_rows,
    use_omnitrain_experts,
)
from omnitrain.ops.experts.declared import names_by_expert, num_experts_of, weight_names
from omnitrain.recipe.globs import matches


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        name: of their module.
        weights: names of their parameters that have an expert per entry of dim 0.
        num_experts: of the layer.
        backend: that was named for it, or ``auto``.
    """

    name: str
    weights: tuple[str, ...]
    num_experts: int
    backend: str


def expert_layers(model: OmniModel) -> dict[str, tuple[ExpertLayer, ...]]:
    """Component -> its layers whose experts ask transformers' ``ExpertsInterface``."""
    owner = {path: name for name, parameters in model.components.items() for path in parameters}
    found: dict[str, list[ExpertLayer]] = {name: [] for name in model.components}
    for name, module in experts_in(model):
        weights = tuple(f"{name}.{weight}" for weight in weight_names(module))
        found[owner[weights[0]]].append(ExpertLayer(name, weights, num_experts_of(module), backend_of(module)))
    return {name: tuple(layers) for name, layers in found.items()}


def chosen_layers(layers: Sequence[ExpertLayer], ep_plan: Mapping[str, int] | None) -> tuple[ExpertLayer, ...]:
    """Those that ``ep_plan`` names; without one, all of them."""
    if ep_plan is None:
        return tuple(layers)
    return tuple(layer for layer in layers if any(matches(glob, name) for glob in ep_plan for name in layer.weights))


def ep_plan_problems(layers: Mapping[str, Sequence[ExpertLayer]], ep_plan: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with globs for experts, each of which matches some name of the model."""
    every_layer = [layer for own in layers.values() for layer in own]
    for glob, dim in ep_plan.items():
        if dim != 0:
            yield f"ep_plan: `{glob}` says dimension {dim}; transformers' experts are counted by dimension 0"
        if not any(matches(glob, name) for layer in every_layer for name in layer.weights):
            yield f"ep_plan: `{glob}` names no weights of experts; {_named(every_layer)}"
    for layer in every_layer:
        taken = {name: any(matches(glob, name) for glob in ep_plan) for name in layer.weights}
        if any(taken.values()) and not all(taken.values()):
            left = ", ".join(name for name, is_taken in taken.items() if not is_taken)
            yield f"ep_plan: takes only a part of the weights of {layer.name}; {left} must be with the others"


def _named(layers: Sequence[ExpertLayer]) -> str:
    if not layers:
        return "the model has none"
    return f"expected some such as {', '.join(f'`{name}`' for name in layers[0].weights)}"


def bound_rows(model: OmniModel, layers: Sequence[ExpertLayer], rows: int | None) -> None:
    """Let the experts of ``layers`` compute so many rows at a time."""
    for layer in layers:
        module = model.get_submodule(layer.name)
        set_row_budget(module, rows)
        use_omnitrain_experts(module, layer.backend)


def spread_experts(model: OmniModel, layers: Sequence[ExpertLayer], mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
    """Keep this rank's part of the experts of ``layers``, and let tokens travel to theirs.

    Args:
        model: its weights equal on all ranks of ``mesh``; changed in place.
        layers: their numbers of experts are multiples of the mesh's size.
        mesh: ``[ep]``.
        tp_mesh: ``[tp]``, ranks that hold the same tokens.
    """
    # A shard of a shard is put together in two steps, of which torch warns; it is done when weights are saved.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for layer in layers:
        module = model.get_submodule(layer.name)
        for name in names_by_expert(module):
            module._parameters[name] = _own_part(getattr(module, name), mesh)
        set_dispatcher(module, RankDispatcher(mesh.get_group(), tp_mesh.get_group()))
        use_omnitrain_experts(module, layer.backend)


def _own_part(weight: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """No rank sends another anything: all have the same weights. The rest of them is freed."""
    part = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    return nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False), requires_grad=weight.requires_grad)


@dataclass(frozen=True, eq=False)
class Travel:
    """The ways of one layer's rows.

    Attributes:
        share: which of the tokens this rank sends: all, or its part of those that tensor parallel ranks hold alike.
        routes: this rank's tokens to rows sorted by expert, and so by the rank that has it.
        sent: rows that go to each rank.
        received: rows that come from each rank.
        arrived: rows as they come, by sender, to rows sorted by this rank's experts.
        returning: the inverse.
    """

    share: slice
    routes: Routes
    sent: list[int]
    received: list[int]
    arrived: Routes
    returning: Routes


class RankDispatcher:
    """All-to-alls of rows among the ranks of ``group``, each of which has an equal part of the experts, in order.

    Every rank takes part in every call, with any number of tokens. Planning waits for the device once; the other steps
    do not.

    Args:
        group: of the experts.
        alike: ranks that hold the same tokens; each sends its part of them. A rank's gradients of what they hold alike
            are its own part of it, as everywhere in tensor parallelism: they add up over these ranks.
    """

    def __init__(self, group: dist.ProcessGroup, alike: dist.ProcessGroup) -> None:
        self.group, self.alike = group, alike
        self.bytes_sent = 0
        self._rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def plan(self, top_k_index: Tensor, num_experts: int) -> Travel:
        """Exchange counts; see :class:`omnitrain.ops.experts.Dispatcher`."""
        share = _share(top_k_index.size(0), self.alike)
        routes = sort_by_expert(top_k_index[share], num_experts)
        to_send = routes.counts.view(self.size, -1)
        to_get = torch.empty_like(to_send)
        dist.all_to_all_single(to_get, to_send, group=self.group)
        sent, received = torch.stack([to_send.sum(1), to_get.sum(1)]).tolist()
        own = torch.arange(to_get.size(1), device=to_get.device).repeat(self.size)
        of_row = own.repeat_interleave(to_get.view(-1), output_size=sum(received))
        arrived = sort_by_expert(of_row.unsqueeze(-1), to_get.size(1))
        returning = Routes(arrived.row_of_slot.view(-1), arrived.token_of_row.unsqueeze(-1), arrived.ends)
        return Travel(share, routes, sent, received, arrived, returning)

    def dispatch(self, tokens: Tensor, plan: Travel) -> tuple[Tensor, Tensor]:
        """Rows of the tokens that chose this rank's experts, sorted by these, and where each expert's end."""
        rows = self._exchanged(take_rows(tokens[plan.share], plan.routes), plan.sent, plan.received)
        return take_rows(rows, plan.arrived), plan.arrived.ends

    def combine(self, rows: Tensor, weights: Tensor, plan: Travel) -> Tensor:
        """The way back, and the weighted sum where the tokens are."""
        results = self._exchanged(take_rows(rows, plan.returning), plan.received, plan.sent)
        own = combine_rows(results, weights[plan.share], plan.routes)
        if dist.get_world_size(self.alike) == 1:
            return own
        return gather_rows(own, _shares(weights.size(0), dist.get_world_size(self.alike)), self.alike)

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if not is_replaying():
            self.bytes_sent += (sum(sent) - sent[self._rank]) * rows.size(1) * rows.element_size()
        return exchange_rows(rows, sent, received, self.group)


def _shares(num_tokens: int, ranks: int) -> list[int]:
    """How many of the tokens that ``ranks`` hold alike each of them sends."""
    each, left = divmod(num_tokens, ranks)
    return [each + (rank < left) for rank in range(ranks)]


def _share(num_tokens: int, alike: dist.ProcessGroup) -> slice:
    """This rank's run of them."""
    stops = list(accumulate(_shares(num_tokens, dist.get_world_size(alike)), initial=0))
    return slice(*stops[dist.get_rank(alike) :][:2])


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows to the ranks of ``group`` in order, and theirs from them; gradients go the way back.

    Args:
        rows: ``[sum of sent, H]``.
        sent: rows for each rank.
        received: rows from each rank.
        group: all of its ranks call this, forward and backward.

    Returns:
        ``[sum of received, H]``.
    """
    moved: Tensor = _ExchangeRows.apply(rows, sent, received, group)
    return moved


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.ways = sent, received, group
        return _moved(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.ways
        return _moved(gradients[0], received, sent, group), None, None, None


def _moved(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), rows.size(1))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
