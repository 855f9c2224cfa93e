"""Encode on the ranks of a section: its actions in a step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from omnitrain.models.omni.encode import ComponentCalls, call_component, reading
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.draws import StepDraws
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.step.work import work_of_window
from omnitrain.plan.schedule.actions import Action, Kind


class _Encoded(NamedTuple):
    """A window between its forward and its backward.

    Attributes:
        tensors: ``[features, ...]`` each, of all calls; None if the backward encodes again.
        idle: results of calls without data.
        num_rows: number of features that this rank has encoded.
        read: ``[rows, ...]`` each, leaves: the features of another section from which they were encoded.
    """

    tensors: tuple[Tensor, ...] | None
    idle: list[Tensor]
    num_rows: int
    read: tuple[Tensor, ...] = ()


class SectionEncoders:
    """The encoders of a section in a step, on one of its ranks.

    Args:
        model: parallelized.
        batch: the step.
        draws: random numbers of the step, if the foundation draws any.
        upcoming: the next step, some of whose windows are encoded in this one.
    """

    def __init__(
        self, model: OmniModel, batch: StepBatch, draws: StepDraws | None, upcoming: StepBatch | None = None
    ) -> None:
        layout = layout_of(model)
        assert layout is not None
        self._model, self._batch, self._layout, self._upcoming = model, batch, layout, upcoming
        self._draws = draws or StepDraws(model.device)  # an encoder may draw where the foundation does not
        self._twice = layout.section is not None and layout.section.encode_twice
        self._live: dict[tuple[str, int], _Encoded] = {}
        self._before: dict[tuple[str, int], tuple[Tensor, ...]] = {}  # features that the step before has encoded
        self._received: dict[tuple[str, int], tuple[Tensor, ...]] = {}  # features of other sections
        self._returning: dict[tuple[str, int], tuple[Tensor, ...]] = {}  # the same, with gradients
        for component, edge in ((c, edge) for c, edge in layout.edges.items() if layout.holds(c)):
            if edge.kept_of is batch.plan:
                self._before |= {(component, window): tensors for window, tensors in edge.kept.items()}
            edge.kept, edge.kept_of = {}, None if upcoming is None else upcoming.plan
        self._gradients: dict[tuple[str, int], list[Tensor]] = {}

    def encode(self, action: Action) -> None:
        """Make this rank's calls for the items of a window."""
        component, window = _key(action)
        if (later := window - self._batch.plan.num_micro_batches) >= 0:
            self._encode_ahead(component, later)
            return
        keeps_graph = self._layout.components[component].is_trained and not self._twice
        read = self._received.pop((self._reads(component), window), ())
        with torch.set_grad_enabled(keeps_graph):
            self._live[component, window] = self._encoded(self._batch, component, window, read)

    def _encode_ahead(self, component: str, window: int) -> None:
        """Encode a window of the next step, and keep its features until that step sends them."""
        assert self._upcoming is not None
        with torch.no_grad():
            encoded = self._encoded(self._upcoming, component, window)
        self._layout.edges[component].kept[window] = encoded.tensors or ()

    def send(self, action: Action) -> None:
        """Send the features of a window to the ranks that need them, or return the gradients of those that it read."""
        key = component, window = _key(action)
        edge = self._layout.edges[component]
        if action.kind is Kind.SEND_B:
            gradients = [(leaf, leaf.grad) for leaf in self._returning.pop(key) if leaf.requires_grad]
            edge.give_back(window, [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in gradients])
            return
        if key in self._before:
            edge.send(window, self._before.pop(key))
            return
        encoded = self._live[key]
        assert encoded.tensors is not None
        edge.send(window, encoded.tensors)
        if not self._layout.components[component].is_trained:
            del self._live[key]
        elif self._twice:
            self._live[key] = encoded._replace(tensors=None, idle=[])

    def receive(self, action: Action) -> None:
        """Wait for the gradients of a window, or for the features that another section has encoded."""
        key = component, window = _key(action)
        edge = self._layout.edges[component]
        if action.kind is Kind.RECV_F:
            features = zip(edge.take(window), edge.form.has_gradient, strict=True)
            self._received[key] = tuple(rows.detach().requires_grad_(has_gradient) for rows, has_gradient in features)
        else:
            self._gradients[key] = edge.take_gradients(window, self._live[key].num_rows)

    def backward(self, action: Action) -> None:
        """Run the backward of a window."""
        key = component, window = _key(action)
        encoded, edge = self._live.pop(key), self._layout.edges[component]
        gradients = iter(self._gradients.pop(key))
        if encoded.tensors is None:
            encoded = self._encoded(self._batch, component, window, encoded.read)
            assert encoded.tensors is not None
        pairs = [
            (tensor, next(gradients))
            for tensor, has_gradient in zip(encoded.tensors, edge.form.has_gradient, strict=True)
            if has_gradient
        ]
        pairs += [(tensor, torch.zeros_like(tensor)) for tensor in encoded.idle]
        pairs = [pair for pair in pairs if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        if encoded.read:
            self._returning[self._reads(component), window] = encoded.read

    def _encoded(self, batch: StepBatch, component: str, window: int, read: tuple[Tensor, ...] = ()) -> _Encoded:
        work = work_of_window(self._model, batch, component, window)
        if read:
            form = self._layout.edges[self._reads(component)].form
            rows = form.pattern.with_tensors(read, (len(read[0]),))
            work = replace(work, media_calls={n: reading(items, rows) for n, items in work.media_calls.items()})
        with self._drawing(component, window):
            calls = call_component(self._model, component, work)
        tensors = _joined(calls)
        return _Encoded(tensors, calls.idle, len(tensors[0]), read)

    def _reads(self, component: str) -> str:
        """The component of another section whose features a component reads; empty: it reads media."""
        return self._batch.plan.topology.component(component).reads

    def _drawing(self, component: str, window: int) -> AbstractContextManager[None]:
        """Ranks with other items draw other random numbers; a repeated forward draws the same."""
        caller = int(self._batch.plan.topology.call_group_of(component)[self._layout.state.rank, 0])
        return self._draws.forward(component, window, caller)


def _joined(calls: ComponentCalls) -> tuple[Tensor, ...]:
    """The tensors of all calls, one after the other; without calls, of no rows."""
    own = [features.tensors() for of_name in calls.made.values() for features in of_name]
    if not own:
        return tuple(tensor[:0] for tensor in calls.minimal[0].tensors())
    return tuple(torch.cat(tensors) for tensors in zip(*own, strict=True))


def _key(action: Action) -> tuple[str, int]:
    assert action.micro_batch is not None
    return action.component, action.micro_batch
