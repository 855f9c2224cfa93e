"""The components of a rank in a step: nodes that encode windows of micro-batches, and edges on which features move.

The graph is cut at the features of each component. Those who read them read leaves, and the backward of a window starts
from the gradients of these leaves when all of them are there. A component that the forwards call has windows of one
micro-batch, which the first stage encodes before its forward and whose backward it runs after its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from omnitrain.data.packing.pack import Pack
from omnitrain.models.discovery import MediaFeatures
from omnitrain.models.omni.encode import call_component, divided_labels, reading, recorded
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.draws import StepDraws
from omnitrain.ops.timing import FEATURES, Phase, What
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.schedule.edge import GroupEdge
from omnitrain.parallel.schedule.node import Node, Run, Window
from omnitrain.parallel.sections.edges import FeatureEdge
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.step.work import calls_in, exchange_in
from omnitrain.plan import Placement
from omnitrain.plan.schedule.actions import Action, Kind


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
        self._messages: Mapping[str, FeatureEdge] = {} if self._layout is None else self._layout.edges
        media = [placement for placement in self._topology.components if placement.media]
        self._nodes = {placement.name: self._node(placement, trains=trains, twice=twice) for placement in media}
        # decoder of this section and window -> labels of the items that this rank has encoded
        self.labels: dict[tuple[str, int], Tensor] = {}
        self._take_kept(upcoming)

    def _node(self, placement: Placement, *, trains: bool, twice: bool) -> Node:
        is_trained = placement.is_trained and trains
        exchange = partial(exchange_in, self._model, self._batch, placement)
        waiting = partial(_waiting, self._model, placement.name)
        edge = self._messages.get(placement.name) or GroupEdge(exchange, waiting, is_trained=is_trained)
        return Node(placement, edge, is_trained=is_trained, twice=twice)

    def _take_kept(self, upcoming: StepBatch | None) -> None:
        """Take the features that the step before has encoded, and make room for those of the next step."""
        for component, edge in self._messages.items():
            if self._layout is not None and self._layout.holds(component):
                kept = edge.take_kept(self._batch.plan)
                windows = {first: Window(edge.form.pattern, tensors) for first, tensors in kept.items()}
                self._nodes[component].windows |= windows
                if upcoming is not None:
                    edge.keep_for(upcoming.plan)

    # What the actions of a schedule do

    def encode(self, action: Action) -> None:
        """Make this rank's calls for the items of a window. Ranks with other items draw other random numbers."""
        component, window = _key(action)
        if (later := window - self._batch.plan.num_micro_batches) >= 0:
            assert self._upcoming is not None
            with torch.no_grad():
                features, *_ = self._run(self._upcoming, component, later)()
            self._messages[component].kept[later] = tuple(features.tensors())
        elif self._is_encoded(component, window):
            self._encode(component, window)

    def exchange(self, action: Action) -> None:
        """Send the features of a window to the ranks of its group that read them; take those that this one reads."""
        component, window = _key(action)
        if window in self._nodes[component].windows:
            self._move(component, window)

    def send(self, action: Action) -> None:
        """Send the features of a window to a section that reads them, or the gradients of those that this rank read."""
        component, window = _key(action)
        node = self._nodes[component]
        if action.kind is Kind.SEND_B:
            node.edge.give_back(window, node.windows.pop(window).all_gradients(self._model.device))
        else:
            node.send(window)
            self._messages[component].expect_back(window)
            if self._layout is not None and component in self._layout.losses:
                self._layout.losses[component].expect_back(window)

    def receive(self, action: Action) -> None:
        """Wait for the features of a window, or for the gradients of those that this rank has encoded."""
        component, window = _key(action)
        node, form = self._nodes[component], self._messages[component].form
        if action.kind is Kind.RECV_F:
            node.windows[window] = Window(form.pattern)
            self._take(component, window, [has and node.is_trained for has in form.has_gradient])
        else:
            encoded = node.windows[window]
            encoded.has_gradient = form.has_gradient
            encoded.returned = node.edge.take_gradients(window, encoded.num_rows)

    def backward(self, component: str, window: int) -> None:
        """Run the backward of a window, where the gradients of its features have come."""
        node = self._nodes[component]
        if window not in node.windows:
            return  # no rank has items
        node.backward(window, self._model.device)
        if reads := node.placement.reads:
            self._keep_gradients(reads, self._start(reads, window), window)

    # What the forwards and backwards of micro-batches read and give

    def features_of(self, micro_batch: int, pack: Pack) -> dict[str, MediaFeatures]:
        """Return component -> its features for a micro-batch: leaves of its graph, or constants of frozen components.

        The components that the forwards call are called now.

        Args:
            micro_batch: its index.
            pack: its pack on this rank, on the model's device.
        """
        return self._features_of(micro_batch, pack, at_end=False)

    def _features_of(self, micro_batch: int, pack: Pack, *, at_end: bool) -> dict[str, MediaFeatures]:
        for component in self._called(micro_batch, at_end=at_end):
            self._encode(component, micro_batch, pack)
            self._move(component, micro_batch)
        return {
            component: window.read(micro_batch, self._model.device)
            for component, window in self._read_in(micro_batch, at_end=at_end).items()
        }

    def features_at_end(self, micro_batch: int, pack: Pack) -> dict[str, MediaFeatures]:
        """Return, on a last stage that is not the first, the features that it reads, as constants.

        Those of decoders have the labels. Of a teacher nobody else reads them.
        """
        found = self._features_of(micro_batch, pack, at_end=True)
        self._forget(micro_batch, at_end=True)
        for component in self._called(micro_batch):
            placement = self._nodes[component].placement
            if placement.head is not None:
                with torch.no_grad():
                    features, *_ = self._run(self._batch, component, micro_batch, pack)()
                exchange = exchange_in(self._model, self._batch, placement, micro_batch)
                tensors = features.tensors()
                found[component] = features.with_rows(tensors if exchange is None else exchange.send(tensors))
        return found

    def take_gradients(self, micro_batch: int) -> None:
        """Keep the gradients of a micro-batch's features, after its backward on the first stage."""
        self._forget(micro_batch, at_end=False)

    def _forget(self, micro_batch: int, *, at_end: bool) -> None:
        """Forget the features of a micro-batch, and keep their gradients."""
        for component in self._read_in(micro_batch, at_end=at_end):
            self._keep_gradients(component, self._start(component, micro_batch), micro_batch)

    def with_backward(self, micro_batch: int) -> list[str]:
        """Return the components that the forward of a micro-batch has called and whose backward follows, in order.

        A component whose features have no graph is left out, such as a decoder with a frozen embedding.
        """
        called = [self._nodes[component] for component in reversed(self._called(micro_batch))]
        for node in called:
            if not node.has_backward(micro_batch):
                node.windows.pop(micro_batch, None)
        return [node.placement.name for node in called if micro_batch in node.windows]

    @property
    def left(self) -> list[tuple[str, int]]:
        """The windows (component, first micro-batch) whose features or gradients nobody has taken."""
        return [(component, window) for component, node in self._nodes.items() for window in node.left]

    def finish(self) -> None:
        """End the step: wait until all messages have left."""
        for edge in self._messages.values():
            edge.finish()
        assert not self.left, f"(component, window) whose features or gradients nobody has taken: {self.left}"

    def waiting_bytes(self, component: str) -> int:
        """Return the bytes of features and gradients of a component that wait on this rank now."""
        return sum(window.num_bytes for window in self._nodes[component].windows.values())

    # One window of one component

    def _encode(self, component: str, window: int, pack: Pack | None = None) -> None:
        node = self._nodes[component]
        labels = node.encode(window, self._run(self._batch, component, window, pack))
        if labels is not None:
            self.labels[component, window] = labels
        if (reads := node.placement.reads) and not node.is_trained:
            self._keep_gradients(reads, self._start(reads, window), window)

    def _run(self, batch: StepBatch, component: str, window: int, pack: Pack | None = None) -> Run:
        """What makes this rank's calls, as often as it is called; for the ``pack`` of a forward, or for a window."""
        leaves = self._leaves_for(component, window)
        caller, draws = int(self._topology.call_group_of(component)[self._rank, 0]), None if pack else self._draws
        around = nullcontext if self._layout is None else self._layout.sharing.get(component, nullcontext)

        def run() -> tuple[MediaFeatures, list[Tensor], Tensor | None]:
            items, numbers = calls_in(self._model, batch, component, window, pack)
            if leaves is not None:
                items = {name: reading(groups, leaves) for name, groups in items.items()}
            with nullcontext() if draws is None else draws.forward(component, window, caller):
                features, idle = call_component(self._model, component, items, numbers, around)
            stay = component in self._topology.heads_apart
            features, labels = divided_labels(features) if stay else (features, None)
            return features, idle, labels

        return run

    def _leaves_for(self, component: str, window: int) -> MediaFeatures | None:
        """The features of another component that a component reads in a window; None: it reads media."""
        read = self._nodes[component].placement.reads
        if not read:
            return None
        return self._nodes[read].windows[self._start(read, window)].read(window, self._model.device)

    def _move(self, component: str, window: int) -> None:
        """The features of a window go to the ranks of its group that read them."""
        node = self._nodes[component]
        encoded = node.windows[window]
        node.edge.send(window, encoded.leave())
        has_gradient = [root is not None for root in encoded.roots]
        if self._topology.moves(component):  # ranks without items have the gradients of those with items
            has_gradient = [node.is_trained and tensor.is_floating_point() for tensor in encoded.form.tensors()]
        self._take(component, window, has_gradient)
        limit = None if self._layout is None else self._layout.components[component].plan.encode.feature_bytes
        waiting = self.waiting_bytes(component)
        if limit is not None and waiting > limit:
            raise RuntimeError(
                f"{waiting:,} bytes of features of {component} wait, more than encode.feature_bytes {limit:,}"
            )

    def _take(self, component: str, window: int, has_gradient: Sequence[bool]) -> None:
        """Take the features that this rank reads, and divide them into the parts of their reader."""
        node, rows = self._nodes[component], self._rows_by_part(component, window)
        received = node.edge.take(window)
        if len(rows) == 1:
            held = {part: [*received] for part in rows}
        else:  # copies, as a view would keep the memory of the whole window until its last part
            pieces = zip(*([p.clone() for p in tensor.split([*rows.values()])] for tensor in received), strict=True)
            held = {part: [*piece] for part, piece in zip(rows, pieces, strict=True)}
        held = {part: self._waiting_there(component, tensors) for part, tensors in held.items()}
        if any(has_gradient) or self._reads_here(component):
            node.windows[window].held, node.windows[window].has_gradient = held, has_gradient
        node.forget_read(window)

    def _keep_gradients(self, component: str, window: int, part: int) -> None:
        """Keep the gradients of a part, after the backward of its reader; without any, forget it."""
        node = self._nodes[component]
        read = node.windows[window]
        read.gradients[part] = self._waiting_there(component, read.take_gradients(part))
        node.forget_read(window)

    def _reads_here(self, component: str) -> bool:
        """Whether this rank reads the features of a component that it got: on a stage, or where its reader is."""
        behind, is_called = self._nodes[component].placement.behind, component in self._topology.names("forward")
        is_there = self._topology.first_stage[self._rank] + behind == self._rank
        return is_called or is_there or self._topology.reader_of(component) is not None

    def _called(self, micro_batch: int, *, at_end: bool = False) -> list[str]:
        """The components that a stage calls in the forward of a micro-batch, in the order in which they encode."""
        called = {n for n in self._topology.names("forward") if self._topology.component(n).at_end == at_end}
        return [n for n in self._nodes if n in called and self._is_encoded(n, micro_batch)]

    def _is_encoded(self, component: str, window: int) -> bool:
        numbers, _ = self._batch.plan.calls_and_heads(window)
        return any(numbers[name] for name in self._nodes[component].placement.media)

    def _read_in(self, micro_batch: int, *, at_end: bool) -> dict[str, Window]:
        """The components whose features a stage reads in a micro-batch, and the windows that it is in."""
        mine = [name for name, node in self._nodes.items() if node.placement.at_end == at_end]
        by_foundation = [name for name in mine if self._topology.reader_of(name) is None]
        starts = {name: self._start(name, micro_batch) for name in by_foundation}
        windows = {name: self._nodes[name].windows.get(start) for name, start in starts.items()}
        return {name: window for name, window in windows.items() if window is not None}

    def _start(self, component: str, micro_batch: int) -> int:
        return micro_batch - micro_batch % self._size(component)

    def _size(self, component: str) -> int:
        return self._nodes[component].placement.window or self._batch.plan.num_micro_batches

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


def _key(action: Action) -> tuple[str, int]:
    assert action.micro_batch is not None
    return action.component, action.micro_batch


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return held.copy_(tensor, non_blocking=True)
