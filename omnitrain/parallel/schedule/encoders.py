"""Run encoders outside of the forwards of micro-batches: ``ENCODE``, ``EXCHANGE`` and ``ENCODE_B`` of a schedule.

Encoders that have ranks of their own run there (``section.py``); here their features are received, and their gradients
sent back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from omnitrain.models.discovery import MediaFeatures
from omnitrain.models.omni.encode import (
    ComponentCalls,
    MicroBatchWork,
    ReceivedFeatures,
    call_component,
    exchange_features,
)
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.draws import StepDraws
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.step.work import work_of_window
from omnitrain.plan.schedule.actions import Action


@dataclass
class _Window:
    """A window of a component, from its exchange to its backward.

    Attributes:
        pattern: the form of the features, without any.
        has_gradient: for each tensor of the features, whether it gets a gradient.
        roots: the results whose backward runs: the features that this rank received, then those of calls without data.
            Only their nodes in the graph are kept. None if a section has encoded them.
        held: micro-batch -> its part of the received features, in the memory where it waits.
        leaves: micro-batch -> the same on the device, while its forward and backward need it.
        gradients: micro-batch -> gradients of ``leaves``, in the memory where they wait.
    """

    pattern: MediaFeatures
    has_gradient: Sequence[bool]
    roots: list[_Root]
    held: dict[int, list[Tensor]]
    leaves: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)


class _Root(NamedTuple):
    """A result in the graph of an encoder, without its data. ``edge`` is None for a constant."""

    edge: GradientEdge | None
    shape: torch.Size
    dtype: torch.dtype


class SeparateEncoders:
    """The encoders of a model that have actions of their own in a step.

    The graph is cut between encoders and foundation: the forward of a micro-batch reads leaves, and the backward of a
    window starts from their gradients when all of them are there.

    Args:
        model: parallelized, or on one process.
        batch: the step.
        draws: random numbers of the step, if the model draws any.
        is_first_stage: whether this rank runs the first stage, which reads the features.
    """

    def __init__(self, model: OmniModel, batch: StepBatch, draws: StepDraws | None, *, is_first_stage: bool) -> None:
        self._model, self._batch, self._draws = model, batch, draws
        self._is_first_stage = is_first_stage
        layout = layout_of(model)
        windows = () if layout is None else layout.encoders(batch.plan)
        self._edges = {} if layout is None else layout.edges
        self._sizes = {window.component: window.size for window in windows}
        self._plans, self._rank = {}, 0
        if layout is not None:
            self._rank = layout.state.rank  # all ranks plan together
            self._sizes |= {name: batch.plan.topology.component(name).window or 1 for name in self._edges}
            self._plans = {name: layout.components[name].plan for name in self._sizes}
        self._encoded: dict[tuple[str, int], tuple[MicroBatchWork, ComponentCalls]] = {}
        self._live: dict[tuple[str, int], _Window] = {}

    def encode(self, action: Action) -> None:
        """Make this rank's calls for the items of a window. Ranks with other items draw other random numbers."""
        component, window = _key(action)
        if not self._batch.plan.is_active(component, window):
            return
        work = work_of_window(self._model, self._batch, component, window)
        caller = int(self._batch.plan.topology.call_group_of(component)[self._rank, 0])
        with nullcontext() if self._draws is None else self._draws.forward(component, window, caller):
            self._encoded[component, window] = work, call_component(self._model, component, work)

    def exchange(self, action: Action) -> None:
        """Send the features of a window to the first stage's ranks, and cut the graph there."""
        component, start = _key(action)
        if (component, start) not in self._encoded:
            return
        work, calls = self._encoded.pop((component, start))
        received = exchange_features(self._model, component, calls, work.exchanges[component])
        roots = [_root(tensor) for tensor in (*received, *calls.idle)]
        has_gradient = [root.edge is not None for root in roots[: len(received)]]
        window = _Window(calls.pattern.without_items(), has_gradient, roots, self._split(component, start, received))
        self._live[component, start] = window
        limit, waiting = self._plans[component].feature_bytes, self.waiting_bytes(component)
        if limit is not None and waiting > limit:
            raise RuntimeError(f"{waiting:,} bytes of features of {component} wait, more than feature_bytes {limit:,}")

    def receive(self, action: Action) -> None:
        """Wait for the features of a window that a section has encoded."""
        component, start = _key(action)
        edge = self._edges[component]
        held = self._split(component, start, edge.take(start))
        self._live[component, start] = _Window(edge.form.pattern, edge.form.has_gradient, [], held)

    def _split(self, component: str, start: int, received: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """Micro-batch -> its part of the features of a window, in the memory where it waits."""
        micro_batches = range(start, min(start + self._sizes[component], len(self._batch.packs)))
        numbers = [self._num_features(component, k) for k in micro_batches]
        # Copies, as a view would keep the memory of the whole window until its last micro-batch.
        parts = zip(*([part.clone() for part in tensor.detach().split(numbers)] for tensor in received), strict=True)
        return {k: self._waiting(component, part) for k, part in zip(micro_batches, parts, strict=True)}

    def waiting_bytes(self, component: str) -> int:
        """Return the bytes of features and gradients of a component that wait on this rank now."""
        windows = [window for (name, _), window in self._live.items() if name == component]
        kinds = [kind for window in windows for kind in (window.held, window.leaves, window.gradients)]
        return sum(tensor.nbytes for kind in kinds for tensors in kind.values() for tensor in tensors)

    def features_of(self, micro_batch: int) -> dict[str, ReceivedFeatures]:
        """Return component -> its features for a micro-batch: leaves of its graph, or constants of frozen encoders."""
        found = {}
        for component, window in self._windows_of(micro_batch):
            leaves = tuple(
                tensor.to(self._model.device, non_blocking=True).requires_grad_(has_gradient)
                for tensor, has_gradient in zip(window.held.pop(micro_batch), window.has_gradient, strict=True)
            )
            window.leaves[micro_batch] = leaves
            found[component] = ReceivedFeatures(leaves, window.pattern)
        return found

    def take_gradients(self, micro_batch: int) -> None:
        """Keep the gradients of a micro-batch's features, after its backward on the first stage."""
        for component, window in self._windows_of(micro_batch):
            leaves = window.leaves.pop(micro_batch)
            if not any(window.has_gradient) and all(root.edge is None for root in window.roots):
                continue  # a frozen encoder has no backward
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            window.gradients[micro_batch] = self._waiting(component, gradients)

    def backward(self, action: Action) -> None:
        """Run the backward of a window: gradients of features return to the ranks that encoded them."""
        if (window := self._live.pop(_key(action), None)) is None:
            return
        device = self._model.device
        of_features = self._gradients_of(window)
        edges, gradients = [], []
        for index, root in enumerate(window.roots):
            if root.edge is not None:
                edges.append(root.edge)
                is_feature = index < len(of_features)
                zeros = torch.zeros((), dtype=root.dtype, device=device).expand(root.shape)
                gradients.append(of_features[index] if is_feature else zeros)
        if edges:
            torch.autograd.backward(edges, gradients)

    def give_back(self, action: Action) -> None:
        """Send the gradients of a window to the section that has encoded it."""
        component, start = _key(action)
        window = self._live.pop((component, start))
        of_features = zip(self._gradients_of(window), window.has_gradient, strict=True)
        self._edges[component].give_back(start, [gradient for gradient, is_sent in of_features if is_sent])

    def _gradients_of(self, window: _Window) -> list[Tensor]:
        """The gradients of all features of a window, on the device: one for each tensor."""
        in_order = [window.gradients[k] for k in sorted(window.gradients)]
        return [torch.cat([g.to(self._model.device) for g in tensors]) for tensors in zip(*in_order, strict=True)]

    def _waiting(self, component: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in the memory where they wait."""
        return [*map(_to_host, tensors)] if self._plans[component].features_on == "cpu" else [*tensors]

    def _windows_of(self, micro_batch: int) -> list[tuple[str, _Window]]:
        starts = {name: micro_batch - micro_batch % size for name, size in self._sizes.items()}
        return [(name, self._live[name, start]) for name, start in starts.items() if (name, start) in self._live]

    def _num_features(self, component: str, micro_batch: int) -> int:
        """The number of features that this rank needs for a micro-batch."""
        if not self._is_first_stage:
            return 0
        plan, reader = self._batch.plan, self._batch.plan.topology.reader_of(component)
        if reader is not None:
            calls = plan.calls_of(self._rank, reader, micro_batch)
            return sum(int(plan.item_tokens[item]) for call in calls for item in call.items)
        inputs = self._batch.packs[micro_batch].inputs
        return sum(sum(inputs[name].num_tokens) for name in self._model.media_names[component] if name in inputs)


def _key(action: Action) -> tuple[str, int]:
    assert action.micro_batch is not None
    return action.component, action.micro_batch


def _root(tensor: Tensor) -> _Root:
    return _Root(get_gradient_edge(tensor) if tensor.requires_grad else None, tensor.shape, tensor.dtype)


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return held.copy_(tensor, non_blocking=True)
