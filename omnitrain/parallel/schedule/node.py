"""A component as a node of a step's graph, which is cut at its features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from omnitrain.models.discovery import MediaFeatures
from omnitrain.models.omni.encode import ComponentCalls

Run = Callable[[], ComponentCalls]


class _Root(NamedTuple):
    """A result in the graph of a component, without its data. ``edge`` is None for a constant."""

    edge: GradientEdge | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> _Root:
        edge = get_gradient_edge(tensor) if tensor.requires_grad else None
        return _Root(edge, tensor.shape, tensor.dtype, tensor.device)

    def zeros(self) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


@dataclass
class Encoded:
    """A window between its forward and its backward.

    Attributes:
        pattern: the form of the features, without any.
        tensors: ``[features, ...]`` each, of all calls; empty when they have left.
        num_rows: number of features that this rank has encoded.
        roots: the tensors in the graph of the component.
        idle: the same of results of calls without data, whose backward must run, too.
    """

    pattern: MediaFeatures
    tensors: tuple[Tensor, ...]
    num_rows: int
    roots: tuple[_Root, ...]
    idle: tuple[_Root, ...]

    @staticmethod
    def of(calls: ComponentCalls) -> Encoded:
        """Return the results of this rank's calls in a window."""
        tensors = calls.joined
        roots, idle = tuple(map(_Root.of, tensors)), tuple(map(_Root.of, calls.idle))
        return Encoded(calls.pattern.without_items(), tensors, len(tensors[0]), roots, idle)

    @property
    def has_graph(self) -> tuple[bool, ...]:
        """For each of the tensors, whether it has a graph on this rank."""
        return tuple(root.edge is not None for root in self.roots)

    def leave(self) -> tuple[Tensor, ...]:
        """Return the tensors, and keep only their nodes in the graph."""
        tensors, self.tensors = self.tensors, ()
        return tensors


class Node:
    """The calls of a component on this rank, from their forwards to their backwards.

    Args:
        is_trained: whether backwards follow.
        twice: keep no activations; the backward of a window makes its calls again.
    """

    def __init__(self, *, is_trained: bool, twice: bool = False) -> None:
        self._is_trained, self._twice = is_trained, twice
        self._live: dict[int, Encoded] = {}
        self._again: dict[int, Run] = {}

    def encode(self, window: int, run: Run) -> Encoded:
        """Encode a window.

        Args:
            window: its first micro-batch.
            run: makes this rank's calls.
        """
        with torch.set_grad_enabled(self._is_trained and not self._twice and torch.is_grad_enabled()):
            encoded = Encoded.of(run())
        if self._is_trained:
            self._live[window] = encoded
        if self._is_trained and self._twice:
            self._again[window] = run
        return encoded

    def has_backward(self, window: int) -> bool:
        """Return whether a window has a graph: the same on all ranks that call the component."""
        encoded = self._live.get(window)
        return encoded is not None and (self._twice or any(root.edge for root in (*encoded.roots, *encoded.idle)))

    @property
    def windows(self) -> list[int]:
        """The windows whose backward has not come."""
        return [*self._live]

    def forget(self, window: int) -> None:
        """Run no backward of a window."""
        self._live.pop(window, None)

    def num_rows(self, window: int) -> int:
        """Return the number of features of a window that this rank has encoded."""
        return self._live[window].num_rows

    def backward(self, window: int, gradients: Sequence[Tensor | None]) -> None:
        """Run the backward of a window.

        Args:
            window: its first micro-batch.
            gradients: of each of the features' tensors; None: it has none.
        """
        encoded = self._live.pop(window)
        if window in self._again:
            encoded = Encoded.of(self._again.pop(window)())
        pairs = [
            (root, gradient) for root, gradient in zip(encoded.roots, gradients, strict=True) if gradient is not None
        ]
        pairs += [(root, root.zeros()) for root in encoded.idle]
        edges = [(root.edge, gradient) for root, gradient in pairs if root.edge is not None]
        if edges:
            torch.autograd.backward([edge for edge, _ in edges], [gradient for _, gradient in edges])
