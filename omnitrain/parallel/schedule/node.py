"""A component as a node of a step's graph, which is cut at its features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from omnitrain.models.discovery import MediaFeatures
from omnitrain.parallel.schedule.edge import Edge
from omnitrain.plan import Placement

# Makes this rank's calls: their features, idle results, and the labels of a decoder whose head is here, too.
Run = Callable[[], tuple[MediaFeatures, list[Tensor], Tensor | None]]


@dataclass
class Window:
    """A window of a component on this rank, until its backward: what the rank encodes of it, and what it reads of it.

    A part is what one call of the reader reads: a micro-batch of the foundation, a window of another component.

    Attributes:
        form: the form of the features, without any.
        encoded: ``[features, ...]`` each, that this rank has encoded; empty when they have left.
        num_rows: number of features that this rank has encoded.
        roots: the node of each of these tensors in the graph of the component; None: it is a constant.
        idle: the same of results of calls without data, whose backward must run, too, with their gradients of zero.
        again: makes the calls again for the backward; None: their graph is kept.
        has_gradient: for each tensor of the features, whether a gradient comes back.
        held: part -> the features that this rank reads, in the memory where they wait.
        leaves: part -> the same on the device, while its forward and backward need it.
        gradients: part -> gradients of ``leaves`` that have one, in the memory where they wait.
        returned: gradients of ``encoded`` that a message brought.
    """

    form: MediaFeatures
    encoded: tuple[Tensor, ...] = ()
    num_rows: int = 0
    roots: tuple[GradientEdge | None, ...] = ()
    idle: list[tuple[GradientEdge | None, Tensor]] = field(default_factory=list)
    again: Run | None = None
    has_gradient: Sequence[bool] = ()
    held: dict[int, list[Tensor]] = field(default_factory=dict)
    leaves: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)
    returned: list[Tensor] | None = None

    @staticmethod
    def of(features: MediaFeatures, idle: Sequence[Tensor]) -> Window:
        """Return the window of these results of this rank's calls."""
        tensors = tuple(features.tensors())
        zeros = [(_root(t), torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape)) for t in idle]
        return Window(features.without_items(), tensors, len(tensors[0]), tuple(map(_root, tensors)), zeros)

    @property
    def num_bytes(self) -> int:
        """The bytes of features and gradients that wait now."""
        kinds = (self.held, self.leaves, self.gradients)
        return sum(tensor.nbytes for kind in kinds for tensors in kind.values() for tensor in tensors)

    def leave(self) -> tuple[Tensor, ...]:
        """Return what this rank has encoded, and keep only its nodes in the graph."""
        tensors, self.encoded = self.encoded, ()
        return tensors

    def read(self, part: int, device: torch.device) -> MediaFeatures:
        """Return the features of a part as leaves, or as constants of a frozen component."""
        there = [tensor.to(device, non_blocking=True) for tensor in self.held.pop(part)]
        leaves = (t.detach().requires_grad_(has) for t, has in zip(there, self.has_gradient, strict=True))
        self.leaves[part] = tuple(leaves)
        return self.form.with_rows(self.leaves[part])

    def take_gradients(self, part: int) -> list[Tensor]:
        """Return the gradients of the leaves of a part, and forget the leaves."""
        leaves = [leaf for leaf, has in zip(self.leaves.pop(part), self.has_gradient, strict=True) if has]
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    def all_gradients(self, device: torch.device) -> list[Tensor]:
        """Return the gradients of all parts, on the device; zeros of parts that nobody has read here."""
        unread = {
            part: [torch.zeros_like(t) for t, has in zip(held, self.has_gradient, strict=True) if has]
            for part, held in self.held.items()
        }
        in_order = [tensors for _, tensors in sorted({**unread, **self.gradients}.items())]
        on_device = [[tensor.to(device) for tensor in tensors] for tensors in in_order]
        return on_device[0] if len(on_device) == 1 else [torch.cat(parts) for parts in zip(*on_device, strict=True)]


class Node:
    """A component on this rank in a step.

    Args:
        placement: where and when it runs.
        edge: brings its features to who reads them, and their gradients back.
        is_trained: whether backwards follow.
        twice: keep no activations; the backward of a window makes its calls again.

    Attributes:
        windows: first micro-batch -> the window; of a frozen component, until its features have left and were read.
    """

    def __init__(self, placement: Placement, edge: Edge, *, is_trained: bool, twice: bool = False) -> None:
        self.placement, self.edge, self.is_trained, self._twice = placement, edge, is_trained, twice
        self.windows: dict[int, Window] = {}

    def encode(self, first: int, run: Run) -> Tensor | None:
        """Encode a window; return the labels that stay on this rank.

        Args:
            first: its first micro-batch.
            run: makes this rank's calls.
        """
        with torch.set_grad_enabled(self.is_trained and not self._twice and torch.is_grad_enabled()):
            features, idle, labels = run()
            self.windows[first] = Window.of(features, idle)
        if self.is_trained and self._twice:
            self.windows[first].again = run
        return labels

    def send(self, first: int) -> None:
        """Let the features of a window leave."""
        self.edge.send(first, self.windows[first].leave())
        self.forget_read(first)

    def forget_read(self, first: int) -> None:
        """Forget a window of a frozen component, if nothing of it is read any more."""
        window = self.windows[first]
        if not self.is_trained and not window.encoded and not window.held and not window.leaves:
            del self.windows[first]

    def has_backward(self, first: int) -> bool:
        """Return whether a window has a graph: the same on all ranks that call the component."""
        if not self.is_trained or (window := self.windows.get(first)) is None:
            return False
        return self._twice or any((*window.roots, *(root for root, _ in window.idle)))

    def backward(self, first: int, device: torch.device) -> None:
        """Run the backward of a window, with the gradients of what readers have read of it.

        Args:
            first: its first micro-batch.
            device: of this rank.
        """
        window = self.windows.pop(first)
        gradients = window.returned
        if gradients is None:
            self.edge.give_back(first, window.all_gradients(device))
            gradients = self.edge.take_gradients(first, window.num_rows)
        called = window if window.again is None else Window.of(*window.again()[:2])
        in_turn = iter(gradients)
        of_features = [next(in_turn) if has else None for has in window.has_gradient]
        pairs = [*zip(called.roots, of_features, strict=True), *called.idle]
        edges = [(root, gradient) for root, gradient in pairs if root is not None and gradient is not None]
        if edges:
            torch.autograd.backward([root for root, _ in edges], [gradient for _, gradient in edges])

    @property
    def left(self) -> list[int]:
        """The windows whose features have not left, or whose backward has not come."""
        return [first for first, window in self.windows.items() if self.is_trained or window.encoded]


def _root(tensor: Tensor) -> GradientEdge | None:
    """Where a backward from a tensor begins, without its data; None for a constant."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None
