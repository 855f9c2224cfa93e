"""The components of a rank in a step: nodes that encode windows of micro-batches, and edges on which features move.

The graph is cut at the features of each component. Those who read them read leaves, and the backward of a window starts
from the gradients of these leaves when all of them are there. A component that the forwards call has windows of one
micro-batch, which the first stage encodes before its forward and whose backward it runs after its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from omnitrain.data.packing.pack import Pack
from omnitrain.models.discovery import MediaFeatures
from omnitrain.models.omni.encode import ComponentCalls, call_component, reading, recorded
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.draws import StepDraws
from omnitrain.ops.timing import FEATURES, Phase, What
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.schedule.edge import Edge, GroupEdge
from omnitrain.parallel.schedule.node import Encoded, Node, Run
from omnitrain.parallel.sections.edges import FeatureEdge
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.step.work import calls_in, exchange_in
from omnitrain.plan.schedule.actions import Action, Kind

_Window = tuple[str, int]  # component, first micro-batch


@dataclass
class _Read:
    """The features of a window on a rank that reads them, until their gradients go back.

    A part is what one call of the reader reads: a micro-batch of the foundation, a window of another component.

    Attributes:
        pattern: the form of the features, without any.
        has_gradient: for each tensor of the features, whether it gets a gradient.
        held: part -> its features, in the memory where they wait.
        leaves: part -> the same on the device, while its forward and backward need it.
        gradients: part -> gradients of ``leaves`` that have one, in the memory where they wait.
    """

    pattern: MediaFeatures
    has_gradient: Sequence[bool]
    held: dict[int, list[Tensor]]
    leaves: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The bytes of features and gradients that wait now."""
        kinds = (self.held, self.leaves, self.gradients)
        return sum(tensor.nbytes for kind in kinds for tensors in kind.values() for tensor in tensors)

    def read(self, part: int, device: torch.device) -> MediaFeatures:
        """Return the features of a part as leaves, or as constants of a frozen component."""
        there = [tensor.to(device, non_blocking=True) for tensor in self.held.pop(part)]
        leaves = (t.detach().requires_grad_(has) for t, has in zip(there, self.has_gradient, strict=True))
        self.leaves[part] = tuple(leaves)
        return self.pattern.with_rows(self.leaves[part])

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

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is read any more, and no gradient goes back."""
        return not self.held and not self.leaves and not any(self.has_gradient)


class StepGraph:
    """The nodes and edges of a rank in a step.

    Args:
        model: parallelized, or on one process.
        batch: the step.
        draws: random numbers of the step, if the foundation draws any.
        upcoming: the next step, some of whose windows a section encodes in this one.
        trains: whether the step has backwards.
    """

    def __init__(
        self,
        model: OmniModel,
        batch: StepBatch,
        draws: StepDraws | None,
        upcoming: StepBatch | None = None,
        *,
        trains: bool = True,
    ) -> None:
        self._model, self._batch, self._upcoming = model, batch, upcoming
        self._layout, self._topology = layout_of(model), batch.plan.topology
        self._rank = 0 if self._layout is None else self._layout.state.rank  # all ranks plan together
        section = None if self._layout is None else self._layout.section
        twice = section is not None and section.encode_twice
        # An encoder of a section may draw where the foundation does not.
        self._draws = draws or (StepDraws(model.device) if section is not None and model.training else None)
        self._placements = {placement.name: placement for placement in self._topology.components if placement.media}
        self._trained = {name: placement.is_trained and trains for name, placement in self._placements.items()}
        self._nodes = {name: Node(is_trained=self._trained[name], twice=twice) for name in self._placements}
        self._messages: Mapping[str, FeatureEdge] = {} if self._layout is None else self._layout.edges
        self._edges = {name: self._messages.get(name) or self._group_edge(name) for name in self._placements}
        self._encoded: dict[_Window, Encoded] = {}  # its features have not left yet
        self._read: dict[_Window, _Read] = {}
        self._gradients: dict[_Window, list[Tensor]] = {}  # of features that this rank has encoded
        self._before: dict[_Window, tuple[Tensor, ...]] = {}  # features that the step before has encoded
        self._take_kept(upcoming)

    def _take_kept(self, upcoming: StepBatch | None) -> None:
        """Take the features that the step before has encoded, and make room for those of the next step."""
        for component, edge in self._messages.items():
            if self._layout is not None and self._layout.holds(component):
                self._before |= {(component, window): kept for window, kept in edge.take_kept(self._batch.plan).items()}
                if upcoming is not None:
                    edge.keep_for(upcoming.plan)

    def _group_edge(self, component: str) -> Edge:
        exchange = partial(exchange_in, self._model, self._batch, self._placements[component])
        waiting = partial(_waiting, self._model, component)
        return GroupEdge(exchange, waiting, is_trained=self._trained[component])

    # What the actions of a schedule do

    def encode(self, action: Action) -> None:
        """Make this rank's calls for the items of a window. Ranks with other items draw other random numbers."""
        component, window = _key(action)
        if (later := window - self._batch.plan.num_micro_batches) >= 0:
            assert self._upcoming is not None
            with torch.no_grad():
                self._messages[component].kept[later] = self._run(self._upcoming, component, later)().joined
        elif self._is_encoded(component, window):
            self._encode(component, window)

    def exchange(self, action: Action) -> None:
        """Send the features of a window to the ranks of its group that read them; take those that this one reads."""
        component, window = _key(action)
        if (component, window) in self._encoded:
            self._move(component, window)

    def send(self, action: Action) -> None:
        """Send the features of a window to a section that reads them, or the gradients of those that this rank read."""
        component, window = key = _key(action)
        edge = self._messages[component]
        if action.kind is Kind.SEND_B:
            edge.give_back(window, self._read.pop(key).all_gradients(self._model.device))
        else:
            tensors = self._before.pop(key) if key in self._before else self._encoded.pop(key).leave()
            edge.send(window, tensors)

    def receive(self, action: Action) -> None:
        """Wait for the features of a window, or for the gradients of those that this rank has encoded."""
        component, window = _key(action)
        edge = self._messages[component]
        if action.kind is Kind.RECV_F:
            has_gradient = [has and self._trained[component] for has in edge.form.has_gradient]
            self._take(component, window, edge.form.pattern, has_gradient)
        else:
            num_rows = self._nodes[component].num_rows(window)
            self._gradients[component, window] = edge.take_gradients(window, num_rows)

    def backward(self, component: str, window: int) -> None:
        """Run the backward of a window, where the gradients of its features have come."""
        node, edge = self._nodes[component], self._edges[component]
        if (key := (component, window)) in self._gradients:
            gradients, has_gradient = self._gradients.pop(key), [*self._messages[component].form.has_gradient]
        elif key in self._read:
            read = self._read.pop(key)
            edge.give_back(window, read.all_gradients(self._model.device))
            gradients, has_gradient = edge.take_gradients(window, node.num_rows(window)), [*read.has_gradient]
        else:
            return  # no rank has items
        in_turn = iter(gradients)
        node.backward(window, [next(in_turn) if has else None for has in has_gradient])
        if reads := self._placements[component].reads:
            self._keep_gradients(reads, self._start(reads, window), window)

    # What the forwards and backwards of micro-batches read and give

    def features_of(self, micro_batch: int, pack: Pack) -> dict[str, MediaFeatures]:
        """Return component -> its features for a micro-batch: leaves of its graph, or constants of frozen components.

        The components that the forwards call are called now.

        Args:
            micro_batch: its index.
            pack: its pack on this rank, on the model's device.
        """
        for component in self._called(micro_batch):
            self._encode(component, micro_batch, pack)
            self._move(component, micro_batch)
        return {
            component: self._read[component, self._start(component, micro_batch)].read(micro_batch, self._model.device)
            for component in self._read_in(micro_batch)
        }

    def labels_of(self, micro_batch: int, pack: Pack) -> dict[str, MediaFeatures]:
        """Return decoder -> its features for a micro-batch, without a graph, on a stage that is not the first."""
        found = {}
        for component in self._called(micro_batch):
            if self._placements[component].head is not None:
                with torch.no_grad():
                    calls = self._run(self._batch, component, micro_batch, pack)()
                exchange = exchange_in(self._model, self._batch, self._placements[component], micro_batch)
                tensors = calls.joined if exchange is None else exchange.send(calls.joined)
                found[component] = calls.pattern.with_rows(tensors)
        return found

    def take_gradients(self, micro_batch: int) -> None:
        """Keep the gradients of a micro-batch's features, after its backward on the first stage."""
        for component in self._read_in(micro_batch):
            self._keep_gradients(component, self._start(component, micro_batch), micro_batch)

    def with_backward(self, micro_batch: int) -> list[str]:
        """Return the components that the forward of a micro-batch has called and whose backward follows, in order.

        A component whose features have no graph is left out, such as a decoder with a frozen embedding.
        """
        called = self._called(micro_batch)
        for component in called:
            if not self._nodes[component].has_backward(micro_batch):
                self._nodes[component].forget(micro_batch)
                self._read.pop((component, micro_batch), None)
        return [component for component in reversed(called) if (component, micro_batch) in self._read]

    @property
    def left(self) -> list[_Window]:
        """The windows whose features or gradients nobody has taken."""
        live = [(component, window) for component, node in self._nodes.items() for window in node.windows]
        read = [window for window, read in self._read.items() if any(read.has_gradient)]  # others may have unread parts
        return [*self._encoded, *self._gradients, *self._before, *live, *read]

    def finish(self) -> None:
        """End the step: wait until all messages have left."""
        for edge in self._messages.values():
            edge.finish()
        assert not self.left, f"(component, window) whose features or gradients nobody has taken: {self.left}"

    def waiting_bytes(self, component: str) -> int:
        """Return the bytes of features and gradients of a component that wait on this rank now."""
        return sum(read.num_bytes for (name, _), read in self._read.items() if name == component)

    # One window of one component

    def _encode(self, component: str, window: int, pack: Pack | None = None) -> None:
        run = self._run(self._batch, component, window, pack)
        self._encoded[component, window] = self._nodes[component].encode(window, run)
        if (reads := self._placements[component].reads) and not self._trained[component]:
            self._keep_gradients(reads, self._start(reads, window), window)

    def _run(self, batch: StepBatch, component: str, window: int, pack: Pack | None = None) -> Run:
        """What makes this rank's calls, as often as it is called; for the ``pack`` of a forward, or for a window."""
        leaves = self._leaves_for(component, window)
        caller, draws = int(self._topology.call_group_of(component)[self._rank, 0]), None if pack else self._draws
        around = nullcontext if self._layout is None else self._layout.sharing.get(component, nullcontext)

        def run() -> ComponentCalls:
            items, numbers = calls_in(self._model, batch, component, window, pack)
            if leaves is not None:
                items = {name: reading(groups, leaves) for name, groups in items.items()}
            with nullcontext() if draws is None else draws.forward(component, window, caller):
                return call_component(self._model, component, items, numbers, around)

        return run

    def _leaves_for(self, component: str, window: int) -> MediaFeatures | None:
        """The features of another component that a component reads in a window; None: it reads media."""
        read = self._placements[component].reads
        if not read:
            return None
        return self._read[read, self._start(read, window)].read(window, self._model.device)

    def _move(self, component: str, window: int) -> None:
        """The features of a window go to the ranks of its group that read them."""
        encoded, edge = self._encoded.pop((component, window)), self._edges[component]
        edge.send(window, encoded.leave())
        has_gradient = encoded.has_graph
        if self._topology.moves(component):  # ranks without items have the gradients of those with items
            is_trained = self._trained[component]
            has_gradient = tuple(is_trained and root.dtype.is_floating_point for root in encoded.roots)
        self._take(component, window, encoded.pattern, has_gradient)
        limit = None if self._layout is None else self._layout.components[component].plan.encode.feature_bytes
        waiting = self.waiting_bytes(component)
        if limit is not None and waiting > limit:
            raise RuntimeError(
                f"{waiting:,} bytes of features of {component} wait, more than encode.feature_bytes {limit:,}"
            )

    def _take(self, component: str, window: int, pattern: MediaFeatures, has_gradient: Sequence[bool]) -> None:
        """Take the features that this rank reads, and divide them into the parts of their reader."""
        received, rows = self._edges[component].take(window), self._rows_by_part(component, window)
        if len(rows) == 1:
            held = {part: [*received] for part in rows}
        else:  # copies, as a view would keep the memory of the whole window until its last part
            pieces = zip(*([p.clone() for p in tensor.split([*rows.values()])] for tensor in received), strict=True)
            held = {part: [*piece] for part, piece in zip(rows, pieces, strict=True)}
        held = {part: self._waiting_there(component, tensors) for part, tensors in held.items()}
        if any(has_gradient) or self._reads_here(component):
            self._read[component, window] = _Read(pattern, has_gradient, held)

    def _keep_gradients(self, component: str, window: int, part: int) -> None:
        """Keep the gradients of a part, after the backward of its reader; without any, forget it."""
        read = self._read[component, window]
        read.gradients[part] = self._waiting_there(component, read.take_gradients(part))
        if read.is_done:
            del self._read[component, window]

    def _reads_here(self, component: str) -> bool:
        """Whether this rank reads the features of a component: on the first stage, or where its reader is."""
        is_first = self._topology.first_stage[self._rank] == self._rank
        return is_first or self._topology.reader_of(component) is not None

    def _called(self, micro_batch: int) -> list[str]:
        """The components that the forward of a micro-batch calls, in the order in which they encode."""
        return [n for n, c in self._placements.items() if c.edge == "forward" and self._is_encoded(n, micro_batch)]

    def _is_encoded(self, component: str, window: int) -> bool:
        numbers, _ = self._batch.plan.calls_and_heads(window)
        return any(numbers[name] for name in self._placements[component].media)

    def _read_in(self, micro_batch: int) -> list[str]:
        """The components whose features the foundation reads in a micro-batch."""
        by_foundation = [name for name in self._placements if self._topology.reader_of(name) is None]
        return [name for name in by_foundation if (name, self._start(name, micro_batch)) in self._read]

    def _start(self, component: str, micro_batch: int) -> int:
        return micro_batch - micro_batch % self._size(component)

    def _size(self, component: str) -> int:
        return self._placements[component].window or self._batch.plan.num_micro_batches

    def _rows_by_part(self, component: str, window: int) -> dict[int, int]:
        """Part -> the number of features that this rank reads in it."""
        plan, reader = self._batch.plan, self._topology.reader_of(component)
        stop = min(window + self._size(component), plan.num_micro_batches)
        if reader is not None:
            parts = range(window, stop, self._size(reader))
            calls = {part: plan.calls_of(self._rank, reader, part) for part in parts}
            return {k: sum(int(plan.item_tokens[i]) for c in made for i in c.items) for k, made in calls.items()}
        names, packs = self._model.media_names[component], [self._batch.packs[k] for k in range(window, stop)]
        drawn = [{**pack.inputs, **pack.targets} if self._reads_here(component) else {} for pack in packs]
        rows = [sum(sum(batches[name].num_tokens) for name in names if name in batches) for batches in drawn]
        return dict(zip(range(window, stop), rows, strict=True))

    def _waiting_there(self, component: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in the memory where they wait."""
        is_on_host = self._layout is not None and self._layout.components[component].plan.encode.features_on == "cpu"
        return [*map(_to_host, tensors)] if is_on_host else [*tensors]


def _waiting(model: OmniModel, component: str, phase: Phase) -> AbstractContextManager[None]:
    return recorded(model, What("wait", FEATURES, phase, component))


def _key(action: Action) -> _Window:
    assert action.micro_batch is not None
    return action.component, action.micro_batch


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return held.copy_(tensor, non_blocking=True)
