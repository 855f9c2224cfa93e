"""The media of a micro-batch: this rank's calls of the components, and its pack with their features.

A sharded module gathers its weights when it is called and scatters gradients in its backward. A rank that called it
less often than the others would leave them waiting. So it makes the missing calls with the component's smallest input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from omnitrain.data.packing.pack import MediaBatch, MediaGroup, Pack
from omnitrain.data.packing.sample import NATIVE_PREFIX
from omnitrain.errors import UserError
from omnitrain.models.components.outputs import media_calls
from omnitrain.models.components.protocols import TensorFeatures
from omnitrain.models.discovery.features import MediaFeatures, RowLayout
from omnitrain.models.discovery.interface import WORDS
from omnitrain.models.foundation.runner import EncodedMedia
from omnitrain.models.foundation.sequence_slice import local_positions
from omnitrain.models.omni.teacher import with_teacher_inputs
from omnitrain.ops.attention.packed_context import SequenceSlice
from omnitrain.ops.device import to_device
from omnitrain.ops.timing import What
from omnitrain.recipe.parallel import FOUNDATION


@dataclass(frozen=True)
class MicroBatchWork:
    """This rank's work in the forward of a micro-batch. Empty in one process.

    Attributes:
        heads: decoders whose head every rank calls, with targets or without.
        sequence_slice: the tokens of the pack over which this rank runs the foundation; None: all of them.
        features: component -> its features for this pack, name by name: for all tokens, or for those of this rank. The
            forward calls the components without an entry.
    """

    heads: Collection[str] = ()
    sequence_slice: SequenceSlice | None = None
    features: Mapping[str, MediaFeatures] = field(default_factory=dict)


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

    @property
    def joined(self) -> tuple[Tensor, ...]:
        """``[features, ...]`` each: the tensors of all calls, one after the other; without calls, of no rows."""
        own = [features.tensors() for of_name in self.made.values() for features in of_name]
        if not own:
            return tuple(tensor[:0] for tensor in self.minimal[0].tensors())
        return tuple(own[0]) if len(own) == 1 else tuple(torch.cat(tensors) for tensors in zip(*own, strict=True))


@dataclass(frozen=True)
class EncodedPack:
    """A micro-batch whose media are encoded: all that the foundation and the heads need.

    Attributes:
        pack: the samples, long enough for all ranks that share them.
        work: this rank's work in the micro-batch.
        media: features for the foundation's input, for the tokens that are on this rank.
        labels: decoder name -> ``[n, ...]``, of the whole pack.
        idle: results of calls without data. They enter the loss with a factor of zero.
    """

    pack: Pack
    work: MicroBatchWork
    media: EncodedMedia
    labels: dict[str, Tensor]
    idle: list[Tensor]


def encode(model: Any, pack: Pack, work: MicroBatchWork, components: Collection[str] | None = None) -> EncodedPack:
    """Return a pack with the features of its media: those of ``work``, and of the components that it calls.

    Args:
        model: an :class:`omnitrain.models.omni.model.OmniModel`.
        pack: the micro-batch.
        work: this rank's work in this micro-batch.
        components: only their media; None: those of all components.

    Raises:
        UserError: only other ranks have an encoder of the pack's media, or the foundation.
    """
    model.inference.require(FOUNDATION)
    encoding = _Encoding(model, with_all_inputs(model, pack), work)
    towers = set(model.reads.values())  # what a tower gives goes to its projector
    for component in model.media_names:
        if component not in towers and (components is None or component in components):
            encoding.add(component)
    return encoding.encoded_pack()


class _Encoding:
    """The media of a pack while they are encoded, component by component."""

    def __init__(self, model: Any, pack: Pack, work: MicroBatchWork) -> None:
        self._model, self._pack, self._work = model, pack, work
        self._inserted: list[tuple[Tensor, Tensor]] = []
        self._native: dict[str, MediaFeatures] = {}
        self._words: list[tuple[Tensor, Tensor]] = []
        self._labels: dict[str, Tensor] = {}
        self._idle: list[Tensor] = []
        self._where: dict[str, Tensor] = {}
        self._of_teachers: dict[str, Tensor] = {}

    def encoded_pack(self) -> EncodedPack:
        """Return the result."""
        native = self._model.runner.joined(self._native, self._where)
        media = EncodedMedia(native, self._inserted, self._of_teachers, self._words)
        return EncodedPack(self._pack, self._work, media, self._labels, self._idle)

    def add(self, component: str) -> None:
        """Take or encode the items of a component."""
        drawn = {**self._pack.inputs, **self._pack.targets}
        batches = {name: drawn[name] for name in self._model.media_names[component] if name in drawn}
        places = {name: local_positions(self._work.sequence_slice, batch.positions) for name, batch in batches.items()}
        received = self._work.features.get(component)
        made = self._made(component) if received is None else self._by_name(received, batches, places)
        for name, (index, positions) in places.items():
            features = MediaFeatures.cat(made[name])
            if name in self._pack.targets:
                self._labels[name] = features.side[_LABELS]
                features = replace(features, side={})
            if WORDS in features.side:
                self._spell(component, batches[name], features.side[WORDS])
            if len(features.main) != len(index):
                features = features.at(index)
            self._keep(component, name, features, positions)

    def _spell(self, component: str, batch: MediaBatch, words: Tensor) -> None:
        """Put the words of written media in the place of their placeholders among the labels of the text."""
        rows = written_rows(self._pack, batch)
        if not len(rows):
            return
        if len(words) != len(batch.positions):
            raise UserError(
                f"{component}: this rank has {len(words)} of {len(batch.positions)} words of the media that the model "
                "learns to write; where ranks share a sequence, set `place: local` of it"
            )
        ascending, order = batch.positions.sort()
        found = order[torch.searchsorted(ascending, self._pack.text_rows[rows] + 1)]
        labels = self._pack.text_labels.clone()
        labels[to_device(rows, labels.device)] = words[to_device(found, words.device)]
        self._pack = replace(self._pack, text_labels=labels)

    def _by_name(
        self, received: MediaFeatures, batches: Mapping[str, MediaBatch], places: Mapping[str, tuple[Tensor, Tensor]]
    ) -> dict[str, list[MediaFeatures]]:
        """Split the features of a component by name: those of the pack's items, or of this rank's tokens alone."""
        counts: dict[str, Sequence[int]] = {name: [len(index)] for name, (index, _) in places.items()}
        if sum(map(sum, counts.values())) != len(received.main):
            counts = {name: batch.num_tokens for name, batch in batches.items()}
        sizes = [sum(own) for own in counts.values()]
        pieces = zip(*(tensor.split(sizes) for tensor in received.tensors()), strict=True) if sizes else ()
        return {
            name: [_with_layout_of(self._model, name, received).with_tensors(piece, own)]
            for (name, own), piece in zip(counts.items(), pieces, strict=True)
        }

    def _made(self, component: str) -> dict[str, list[MediaFeatures]]:
        """Name -> the features of each call that this rank makes for its pack."""
        model, names = self._model, self._model.media_names[component]
        calls = {name: own_calls(model, self._pack, name) for name in names}
        if any(calls.values()):
            model.inference.require(component)
        if component in model.reads and any(calls.values()):
            rows = self._rows_of(model.reads[component])
            calls = {name: reading(items, rows) for name, items in calls.items()}
        made = call_component(model, component, calls)
        self._idle += made.idle
        return made.made

    def _rows_of(self, tower: str) -> MediaFeatures:
        """What a tower gives for all items of the pack."""
        if (received := self._work.features.get(tower)) is not None:
            return received
        return MediaFeatures.cat([features for calls in self._made(tower).values() for features in calls])

    def _keep(self, component: str, name: str, features: MediaFeatures, positions: Tensor) -> None:
        """Keep features for the tokens of this rank, which are at ``positions`` of its slice."""
        self._where[name] = positions
        if component in self._model.teachers:
            read = local_positions(self._work.sequence_slice, self._pack.text_rows)[1]
            row = to_device(torch.searchsorted(positions, read), features.main.device)
            self._of_teachers[name] = features.main[row]
        elif not len(positions):  # the model runs as it does over text
            self._idle += features.tensors()
        elif WORDS in features.side:
            self._words.append((positions, features.side[WORDS]))
        elif name.startswith(NATIVE_PREFIX):
            self._native[name] = features
        else:
            self._inserted.append((positions, features.main))


def call_component(
    model: Any,
    component: str,
    calls: Mapping[str, Sequence[MediaGroup]],
    numbers: Mapping[str, int] = MappingProxyType({}),
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> ComponentCalls:
    """Make this rank's calls of a component.

    Args:
        model: an :class:`omnitrain.models.omni.model.OmniModel`.
        component: name of an encoder or decoder.
        calls: name -> the items of each call.
        numbers: name -> number of calls on every rank; this rank makes those that it lacks with the smallest input.
        around: a context for the calls with items.
    """
    made: dict[str, list[MediaFeatures]] = {}
    minimal: list[MediaFeatures] = []
    with recorded(model, What("compute", "encode", "forward", component)):
        for name in model.media_names[component]:  # the same order on all ranks, with or without data
            with around():
                made[name] = [_encoded(model, name, items) for items in calls.get(name, ())]
            minimal += [_minimal(model, name) for _ in range(numbers.get(name, 0) - len(made[name]))]
    return ComponentCalls(made, minimal)


def with_all_inputs(model: Any, pack: Pack) -> Pack:
    """Return a pack in which teachers and the projectors of divided encoders have items, too.

    Args:
        model: an :class:`omnitrain.models.omni.model.OmniModel`.
        pack: a micro-batch.
    """
    return with_teacher_inputs(with_projector_inputs(pack, model.divided), model.teachers)


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


def reading(items: Sequence[MediaGroup], rows: MediaFeatures) -> list[MediaGroup]:
    """Return the calls of a projector with its input.

    Args:
        items: the items of its call, without data; none or one call.
        rows: what the tower gave for all of them, in order.
    """
    features = {"main": rows.main, **rows.side}
    return [replace(group, features=features, num_rows=dict.fromkeys(features, group.num_tokens)) for group in items]


def recorded(model: Any, what: What) -> AbstractContextManager[None]:
    """Return a context that records what a model's components do, where somebody listens."""
    return nullcontext() if model.encode_recorder is None else model.encode_recorder.span(what)


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
    return decoder.lm_head(states, to_device(decoder.minimal_labels(), hidden.device)).sum


def with_zero_gradients(term: Tensor, idle: Iterable[Tensor]) -> Tensor:
    """Return ``term`` with a gradient of zero for all inputs of ``idle``."""
    zeros = [tensor.float().sum() * 0.0 for tensor in idle]
    return term + torch.stack(zeros).sum() if zeros else term


_LABELS = "labels"  # name of a decoder's labels among the side tensors of its features


def _encoded(model: Any, name: str, items: MediaGroup) -> MediaFeatures:
    if name.startswith(NATIVE_PREFIX):
        return _with_words(model, name, lambda: model.runner.encode_call(name, items))
    return features_of(_attached(model, name, items.features, items.num_tokens))


def _with_words(model: Any, name: str, encode: Callable[[], MediaFeatures]) -> MediaFeatures:
    """The features of a native modality; only the ids if they are words of the vocabulary."""
    interface = model.runner.native.interfaces.get(name.removeprefix(NATIVE_PREFIX))
    if interface is None or not interface.are_words:
        return encode()
    features: MediaFeatures = interface.words(model.foundation, encode)
    return features


def written_rows(pack: Pack, batch: MediaBatch) -> Tensor:
    """Return ``[n]`` int64, on the host: indices of ``pack.text_rows`` whose next token is of an item of a batch."""
    return torch.isin(pack.text_rows + 1, batch.positions).nonzero().flatten()


def require_no_words(model: Any, pack: Pack) -> None:
    """Raise a UserError if a pipeline stage would lack the words of media that the model learns to write."""
    for modality, interface in model.runner.native.interfaces.items():
        batch = pack.inputs.get(f"{NATIVE_PREFIX}{modality}")
        if interface.are_words and batch is not None and len(written_rows(pack, batch)):
            raise UserError(
                f"the last stage of a pipeline lacks the words of the {modality} items that the model learns to write; "
                "set `pp` to 1, or drop the rows that ask to write them"
            )


def _minimal(model: Any, name: str) -> MediaFeatures:
    features, num_tokens = model.minimal_input(name)
    if name.startswith(NATIVE_PREFIX):
        interface = model.runner.native.interfaces[name.removeprefix(NATIVE_PREFIX)]
        return _with_words(model, name, lambda: interface.encode(model.foundation, features))
    if name in model.reads and any(p.requires_grad for p in model.get_submodule(model.reads[name]).parameters()):
        # As on ranks with data, the module's input gets a gradient: else FSDP would reduce at another time there.
        features = features | {"main": features["main"].detach().requires_grad_()}
    return features_of(_attached(model, name, features, num_tokens))


def _attached(model: Any, name: str, features: TensorFeatures, num_tokens: tuple[int, ...]) -> Any:
    """The output of an encoder or decoder; of a divided encoder, the output of its tower or its projector."""
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
    interface = model.runner.native.interfaces[name.removeprefix(NATIVE_PREFIX)]
    names = (*interface.side, *[WORDS] * interface.are_words)
    return replace(features, side=dict(zip(names, features.side.values(), strict=True)), layout=interface.layout)
