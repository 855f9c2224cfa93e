"""The media of a micro-batch: this rank's calls of the encoders, and the exchange of features between ranks.

A sharded module gathers its weights when it is called and scatters gradients in its backward. A rank that called it
less often than the others would leave them waiting. So it makes the missing calls with the component's smallest input,
and their results enter its loss with a factor of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from omnitrain.data.packing.pack import MediaBatch, MediaGroup, Pack
from omnitrain.data.packing.sample import NATIVE_PREFIX
from omnitrain.errors import UserError
from omnitrain.models.components.media_calls import media_calls
from omnitrain.models.components.protocols import TensorFeatures
from omnitrain.models.discovery.features import MediaFeatures, RowLayout
from omnitrain.models.foundation.runner import EncodedMedia
from omnitrain.models.foundation.sequence_slice import local_positions
from omnitrain.models.omni.teacher import with_teacher_inputs
from omnitrain.ops.attention.packed_context import SequenceSlice
from omnitrain.ops.device import to_device
from omnitrain.ops.timing import What


class Exchange(Protocol):
    """Sends the tensors of a rank's features to the ranks that need them.

    Attributes:
        around_backward: makes a context in which the gradients return.
    """

    around_backward: Callable[[], AbstractContextManager[None]]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that this rank needs."""
        ...


@dataclass(frozen=True)
class MicroBatchWork:
    """This rank's work in one micro-batch: media calls, exchanges, its slice of the sequence. Empty in one process.

    Names are those of :attr:`Pack.inputs` and :attr:`Pack.targets`.

    Attributes:
        calls: name -> number of calls on every rank. Without an entry, a rank makes the calls that its pack needs.
        heads: decoders whose head every rank calls, with targets or without.
        media_calls: name -> the items of each call of this rank. Without an entry, it encodes those of its own pack.
        exchanges: component -> sends the features that this rank encoded to the ranks that need them, and returns
            those that its own pack needs, name by name in the order of their items. Without an entry, every rank
            encodes for itself.
        sequence_slice: the tokens of the pack over which this rank runs the foundation; None: all of them.
        cut: components whose exchange returns only the features for these tokens.
        together: component -> a context in which all ranks that share the pack make its calls together.
        encoded: component -> its features for this pack, which were encoded before. It makes no calls.
    """

    calls: Mapping[str, int] = field(default_factory=dict)
    heads: Collection[str] = ()
    media_calls: Mapping[str, Sequence[MediaGroup]] = field(default_factory=dict)
    exchanges: Mapping[str, Exchange] = field(default_factory=dict)
    sequence_slice: SequenceSlice | None = None
    cut: Collection[str] = ()
    together: Mapping[str, Callable[[], AbstractContextManager[None]]] = field(default_factory=dict)
    encoded: Mapping[str, ReceivedFeatures] = field(default_factory=dict)


@dataclass(frozen=True)
class ReceivedFeatures:
    """The features of a component for a pack, as an exchange returns them.

    Attributes:
        tensors: ``[n, ...]`` for all items of the pack, name by name.
        pattern: any features of the component; the others have the same form.
    """

    tensors: tuple[Tensor, ...]
    pattern: MediaFeatures


@dataclass(frozen=True)
class ComponentCalls:
    """The results of this rank's calls of a component in a micro-batch, or in a window of micro-batches.

    Attributes:
        made: name -> the features of each call.
        minimal: features of calls without data.
    """

    made: dict[str, list[MediaFeatures]]
    minimal: list[MediaFeatures]

    @property
    def pattern(self) -> MediaFeatures:
        """Any of the features."""
        return next((features for calls in self.made.values() for features in calls), None) or self.minimal[0]

    @property
    def idle(self) -> list[Tensor]:
        """The tensors of calls without data, whose backward must run, too."""
        return [tensor for features in self.minimal for tensor in features.tensors() if tensor.is_floating_point()]


@dataclass(frozen=True)
class EncodedPack:
    """A micro-batch whose media are encoded: all that the foundation and the heads need.

    Attributes:
        pack: the samples, long enough for all ranks that share them.
        work: this rank's work in the micro-batch.
        media: features for the foundation's input, for the tokens that are on this rank.
        labels: decoder name -> ``[n]`` int64, of the whole pack.
        idle: results of calls without data, and tensors of length 0. They enter the loss with a factor of zero.
    """

    pack: Pack
    work: MicroBatchWork
    media: EncodedMedia
    labels: dict[str, Tensor]
    idle: list[Tensor]


def encode(model: Any, pack: Pack, work: MicroBatchWork, components: Collection[str] | None = None) -> EncodedPack:
    """Encode all media of a pack, and make the exchanges and the calls without data of ``work``.

    Args:
        model: an :class:`omnitrain.models.omni.model.OmniModel`.
        pack: the micro-batch.
        work: this rank's work in this micro-batch.
        components: encode only their media; None: those of all components.

    Raises:
        UserError: other ranks have an encoder of the pack's media, and ``work`` does not say that they encode now.
    """
    if model.encoder_relay is not None:
        model.encoder_relay.require_forward()
    pack = with_teacher_inputs(with_projector_inputs(pack, model.divided), model.teachers)
    encoding = _Encoding(model, pack, work)
    towers = set(model.reads.values())  # what a tower gives goes to its projector
    for component in model.media_names:
        if component not in towers and (components is None or component in components):
            encoding.add(component)
    return encoding.encoded_pack()


class _Encoding:
    """The media of a pack while they are encoded, component by component."""

    def __init__(self, model: Any, pack: Pack, work: MicroBatchWork) -> None:
        self._model, self._pack, self._work = model, pack, work
        self._elsewhere = () if model.encoder_relay is None else model.encoder_relay.components
        self._inserted: list[tuple[Tensor, Tensor]] = []
        self._native: dict[str, MediaFeatures] = {}
        self._labels: dict[str, Tensor] = {}
        self._idle: list[Tensor] = []
        self._where: dict[str, Tensor] = {}
        self._of_teachers: dict[str, Tensor] = {}

    def encoded_pack(self) -> EncodedPack:
        """Return the result."""
        native = self._model.runner.joined(self._native, self._where)
        media = EncodedMedia(native, self._inserted, self._of_teachers)
        return EncodedPack(self._pack, self._work, media, self._labels, self._idle)

    def add(self, component: str) -> None:
        """Encode or receive the items of a component."""
        drawn = {**self._pack.inputs, **self._pack.targets}
        batches = {name: drawn[name] for name in self._model.media_names[component] if name in drawn}
        sequence_slice = self._work.sequence_slice
        places = {name: local_positions(sequence_slice, batch.positions) for name, batch in batches.items()}
        made = self._made(component, batches, {name: len(index) for name, (index, _) in places.items()})
        for name in batches:
            self._keep(component, name, MediaFeatures.cat(made[name]), *places[name])

    def _made(
        self, component: str, batches: Mapping[str, MediaBatch], num_local: Mapping[str, int]
    ) -> Mapping[str, Sequence[MediaFeatures]]:
        """Name -> features of the pack's items. ``num_local``: name -> number of those for this rank's tokens."""
        model, work = self._model, self._work
        counts = {name: batch.num_tokens for name, batch in batches.items()}
        if component in work.encoded:
            return _cut(model, work.encoded[component], counts)
        if component in model.reads:
            is_elsewhere = model.reads[component] in self._elsewhere
            work = _with_tower_features(model, component, work, self._pack, is_elsewhere=is_elsewhere)
        if component in self._elsewhere:
            of_pack = {name: own_calls(model, self._pack, name) for name in model.media_names[component]}
            return _from_elsewhere(model, component, work, {**of_pack, **work.media_calls})
        calls = call_component(model, component, work, self._pack)
        self._idle += calls.idle
        if component not in work.exchanges:
            return calls.made
        received = exchange_features(model, component, calls, work.exchanges[component])
        self._idle += [tensor for tensor in received if not len(tensor)]  # their backward is a collective, too
        if component in work.cut:
            counts = {name: (number,) for name, number in num_local.items()}
        return _cut(model, ReceivedFeatures(received, calls.pattern), counts)

    def _keep(self, component: str, name: str, features: MediaFeatures, index: Tensor, positions: Tensor) -> None:
        """Keep features for the tokens of this rank: those at ``index`` of all, for the tokens at ``positions``."""
        self._where[name] = positions
        if name in self._pack.targets:
            self._labels[name] = features.side[_LABELS]
            features = replace(features, side={})
        if self._work.sequence_slice is not None and component not in self._work.cut:
            features = features.at(index)
        if component in self._model.teachers:
            read = local_positions(self._work.sequence_slice, self._pack.text_rows)[1]
            row = to_device(torch.searchsorted(positions, read), features.main.device)
            self._of_teachers[name] = features.main[row]
        elif not len(index):  # the model runs as it does over text
            self._idle += features.tensors()
        elif name.startswith(NATIVE_PREFIX):
            self._native[name] = features
        else:
            self._inserted.append((positions, features.main))


def call_component(model: Any, component: str, work: MicroBatchWork, pack: Pack | None = None) -> ComponentCalls:
    """Make this rank's calls of a component.

    Args:
        model: an :class:`omnitrain.models.omni.model.OmniModel`.
        component: name of an encoder or decoder.
        work: this rank's calls.
        pack: the pack whose items are encoded where ``work`` does not name them.
    """
    made: dict[str, list[MediaFeatures]] = {}
    minimal: list[MediaFeatures] = []
    with _recorded(model, What("compute", "encode", "forward", component)):
        for name in model.media_names[component]:  # the same order on all ranks, with or without data
            if name in work.media_calls or pack is None:
                calls = work.media_calls.get(name, ())
            else:
                calls = own_calls(model, pack, name)
            with work.together.get(component, nullcontext)():
                made[name] = [_encoded(model, name, items) for items in calls]
            minimal += [_minimal(model, name) for _ in range(work.calls.get(name, 0) - len(calls))]
    return ComponentCalls(made, minimal)


def with_projector_inputs(pack: Pack, divided: Collection[str]) -> Pack:
    """Return a pack in which the projectors of divided encoders have items, too: those of their towers, without pixels.

    Args:
        pack: a micro-batch.
        divided: see :class:`~omnitrain.models.components.model.ComponentModel`.
    """
    names = [name for name in divided if name in pack.inputs and f"{name}.projector" not in pack.inputs]
    return replace(pack, inputs=pack.inputs | {f"{n}.projector": _without_data(pack.inputs[n]) for n in names})


def _without_data(batch: MediaBatch) -> MediaBatch:
    samples = tuple(sample for group in batch.groups for sample in group.samples)
    return replace(batch, groups=(MediaGroup({}, {}, batch.num_tokens, samples),))


def reading(items: Sequence[MediaGroup], rows: MediaFeatures) -> tuple[MediaGroup, ...]:
    """Return the calls of a projector with its input.

    Args:
        items: the items of its call, without data; none or one call.
        rows: what the tower gave for all of them, in order.
    """
    features = {"main": rows.main, **rows.side}
    return tuple(
        replace(group, features=features, num_rows=dict.fromkeys(features, group.num_tokens)) for group in items
    )


def _with_tower_features(
    model: Any, component: str, work: MicroBatchWork, pack: Pack, *, is_elsewhere: bool
) -> MicroBatchWork:
    """Return the work with the call of a projector: what its tower gave is its input."""
    tower = model.reads[component]
    (name,), (of_tower,) = model.media_names[component], model.media_names[tower]
    items = work.media_calls.get(name, own_calls(model, pack, name))
    if tower in work.encoded:
        received = work.encoded[tower]
        rows = received.pattern.with_tensors(received.tensors, (len(received.tensors[0]),))
        return replace(work, media_calls={**work.media_calls, name: reading(items, rows)})
    if is_elsewhere:
        made = _from_elsewhere(model, tower, work, {of_tower: own_calls(model, pack, of_tower)})
    else:
        made = call_component(model, tower, work, pack).made
    of_projector = reading(items, MediaFeatures.cat(made[of_tower])) if made.get(of_tower) else ()
    number = min(1, work.calls.get(of_tower, 0))
    return replace(work, calls={name: number, **work.calls}, media_calls={**work.media_calls, name: of_projector})


def _from_elsewhere(
    model: Any, component: str, work: MicroBatchWork, calls: Mapping[str, Sequence[MediaGroup]]
) -> dict[str, list[MediaFeatures]]:
    """Get the features of a component that other ranks have, without a graph. ``calls``: name -> items of each."""
    calls = {name: calls[name] for name in model.media_names[component]}
    if any(work.calls.get(name) for name in calls):  # the same on all ranks
        return model.encoder_relay.encode(component, calls)
    if any(calls.values()):
        raise UserError(
            f"{component} is on other ranks, and a forward by itself does not tell them to encode: use "
            "accumulate_gradients to train, and heldout_loss or generate (in omnitrain.serving) otherwise"
        )
    return {}


def exchange_features(model: Any, component: str, calls: ComponentCalls, exchange: Exchange) -> tuple[Tensor, ...]:
    """Send the features of a component to the ranks that need them; return those that this rank needs.

    Args:
        model: an :class:`omnitrain.models.omni.model.OmniModel`.
        component: name of an encoder or decoder.
        calls: this rank's calls of it.
        exchange: the ranks, and the features of each.
    """
    own = [features for of_name in calls.made.values() for features in of_name]
    sent = [torch.cat(tensors) for tensors in zip(*(f.tensors() for f in own or calls.minimal[:1]), strict=True)]
    exchange.around_backward = partial(_recorded, model, What("wait", FEATURES, "backward", component))
    with _recorded(model, What("wait", FEATURES, "forward", component)):
        return exchange(*(sent if own else [tensor[:0] for tensor in sent]))


def _recorded(model: Any, what: What) -> AbstractContextManager[None]:
    return nullcontext() if model.encode_recorder is None else model.encode_recorder.span(what)


def num_calls(model: Any, pack: Pack) -> dict[str, int]:
    """Return the number of calls of each component that a pack needs, by the names in the pack.

    Args:
        model: an :class:`omnitrain.models.omni.model.OmniModel`.
        pack: a micro-batch.
    """
    return {name: len(own_calls(model, pack, name)) for name in (*pack.inputs, *pack.targets)}


def own_calls(model: Any, pack: Pack, name: str) -> list[MediaGroup]:
    """Return the items of each call for the items of a pack under one of its names; empty if it has no such items."""
    most = model.call_elements.get(name)
    if name.startswith(NATIVE_PREFIX):
        return model.runner.calls(pack, name, most)
    batch = pack.inputs.get(name) or pack.targets.get(name)
    return [] if batch is None else list(media_calls(batch, most_elements=most))


def idle_head(decoder: Any, hidden: Tensor) -> Tensor:
    """Call a decoder's head without targets. ``hidden``: any ``[1, T, hidden]``; returns a scalar.

    It has a backward even where the decoder is frozen: ranks with targets gather its weights there.
    """
    states = hidden[0, :1].detach().requires_grad_()
    return decoder.lm_head(states, torch.zeros(1, dtype=torch.long, device=hidden.device)).sum


def with_zero_gradients(term: Tensor, idle: Iterable[Tensor]) -> Tensor:
    """Return ``term`` with a gradient of zero for all inputs of ``idle``."""
    zeros = [tensor.float().sum() * 0.0 for tensor in idle]
    return term + torch.stack(zeros).sum() if zeros else term


FEATURES = "features"  # name of their exchange in a recording
_LABELS = "labels"  # name of a decoder's labels among the side tensors of its features


def _encoded(model: Any, name: str, items: MediaGroup) -> MediaFeatures:
    if name.startswith(NATIVE_PREFIX):
        return model.runner.encode_call(name, items)
    return features_of(_attached(model, name, items.features, items.num_tokens))


def _minimal(model: Any, name: str) -> MediaFeatures:
    features, num_tokens = model.minimal_input(name)
    if name.startswith(NATIVE_PREFIX):
        return model.runner.native.interfaces[name.removeprefix(NATIVE_PREFIX)].encode(model.foundation, features)
    if name in model.reads and any(p.requires_grad for p in model.get_submodule(model.reads[name]).parameters()):
        # As on ranks with data, the module's input gets a gradient: else FSDP would reduce at another time there.
        features = features | {"main": features["main"].detach().requires_grad_()}
    return features_of(_attached(model, name, features, num_tokens))


def _attached(model: Any, name: str, features: TensorFeatures, num_tokens: tuple[int, ...]) -> Any:
    """The output of an encoder or decoder; of a divided encoder, what its tower or its projector gives."""
    if name in model.divided:
        return model.get_submodule(name).lm_tower(features, num_tokens)
    if name in model.reads:
        return model.get_submodule(name.removesuffix(".projector")).lm_project(features)
    return model.get_submodule(name).lm_encode(features, num_tokens)


def features_of(output: Tensor | tuple[Tensor, Tensor] | TensorFeatures) -> MediaFeatures:
    """An encoder's features ``[n, hidden]``, a decoder's features and labels, or a tower's rows by name."""
    if isinstance(output, dict):
        main, side = output["main"], {name: rows for name, rows in output.items() if name != "main"}
    else:
        main, side = (output, {}) if isinstance(output, Tensor) else (output[0], {_LABELS: output[1]})
    return MediaFeatures(main, side, {}, (len(main),), RowLayout(None, {}, (), ()))


def _with_layout_of(model: Any, name: str, features: MediaFeatures) -> MediaFeatures:
    """Give features the layout of a modality: a tower may return a list for images, and a tensor for videos."""
    if not name.startswith(NATIVE_PREFIX):
        return features
    layout = model.runner.native.interfaces[name.removeprefix(NATIVE_PREFIX)].layout
    return replace(features, side=dict(zip(layout.names[1:], features.side.values(), strict=True)), layout=layout)


def _cut(model: Any, received: ReceivedFeatures, counts: Mapping[str, Sequence[int]]) -> dict[str, list[MediaFeatures]]:
    """Split received features by name. ``counts``: name -> features of each item."""
    sizes = [sum(own) for own in counts.values()]
    pieces = zip(*(tensor.split(sizes) for tensor in received.tensors), strict=True) if sizes else ()
    return {
        name: [_with_layout_of(model, name, received.pattern).with_tensors(piece, own)]
        for (name, own), piece in zip(counts.items(), pieces, strict=True)
    }
