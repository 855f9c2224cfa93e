"""The media of a micro-batch: this rank's calls of the components, and its pack with their features.

A sharded module gathers its weights when it is called and scatters gradients in its backward. A rank that called it
less often than the others would leave them waiting. So it makes the missing calls with the component's smallest input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnitrain.data.packing.pack import MediaBatch, MediaGroup, Pack
from omnitrain.data.packing.sample import NATIVE_PREFIX, Sample
from omnitrain.errors import UserError
from omnitrain.models.components.outputs import media_calls
from omnitrain.models.components.protocols import TensorFeatures
from omnitrain.models.discovery import special_ids
from omnitrain.models.discovery.features import MediaFeatures, RowLayout
from omnitrain.models.discovery.interface import WORDS
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.sequence_slice import local_positions
from omnitrain.ops.host_values import reading_on_host, to_device
from omnitrain.ops.timing import What
from omnitrain.plan.ragged import ranges
from omnitrain.recipe.parallel import FOUNDATION


def encode(model: Any, given: EncodedPack, components: Collection[str] | None = None) -> EncodedPack:
    """Return a pack with the features of its media: those that it has, and of the components that are called for it.

    Args:
        model: an :class:`omnitrain.models.omni.model.OmniModel`.
        given: the micro-batch.
        components: only their media; None: those of all components.

    Raises:
        UserError: only other ranks have an encoder of the pack's media, or the foundation.
    """
    model.inference.require(FOUNDATION)
    pack = with_all_inputs(given.pack, model.divided, model.teachers)
    encoded = replace(given, pack=pack, native={}, inserted=[], words=[], teachers={}, labels={}, idle=[])
    where: dict[str, Tensor] = {}  # name -> positions of its features
    towers = set(model.reads.values())  # what a tower gives goes to its projector
    for component in model.media_names:
        if component not in towers and (components is None or component in components):
            where |= _add(model, encoded, component)
    return replace(_spelled(encoded), native=model.runner.joined(encoded.native, where))


def _spelled(encoded: EncodedPack) -> EncodedPack:
    """Put words of written media in the place of their placeholders among the labels of the text."""
    names = [name for name in encoded.labels if name.startswith(NATIVE_PREFIX)]
    if not names:
        return encoded
    pack, labels = encoded.pack, encoded.pack.text_labels.clone()
    for name in names:
        words, batch = encoded.labels.pop(name), pack.inputs[name]
        rows = written_rows(pack, batch)
        if len(rows) and len(words) != len(batch.positions):
            raise UserError(
                f"{name}: this rank has {len(words)} of {len(batch.positions)} words of media that the model learns to "
                "write, because ranks share its sequences; set `ulysses` and `cp` to 1, or drop these rows"
            )
        ascending, order = batch.positions.sort()
        found = order[torch.searchsorted(ascending, pack.text_rows[rows] + 1)]
        labels[to_device(rows, labels.device)] = words[to_device(found, words.device)]
    return replace(encoded, pack=replace(pack, text_labels=labels))


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


def _add(model: Any, encoded: EncodedPack, component: str) -> dict[str, Tensor]:
    """Add the features of a component to an encoded pack; return their positions by name, on this rank's slice."""
    pack, sequence_slice = encoded.pack, encoded.sequence_slice
    drawn = {**pack.inputs, **pack.targets}
    batches = {name: drawn[name] for name in model.media_names[component] if name in drawn}
    places = {name: local_positions(sequence_slice, batch.positions) for name, batch in batches.items()}
    if not batches:
        return {}
    for name, features in _by_name(model, _features(model, encoded, component), batches, places).items():
        index, positions = places[name]
        if name in pack.targets:
            features, labels = divided_labels(features)
            encoded.labels.update({} if labels is None else {name: labels})
        if WORDS in features.side:
            encoded.labels[name] = features.side[WORDS]
        if len(features.main) != len(index):
            features = features.at(index)
        if component in model.teachers:
            encoded.teachers[name] = positions, features.main
        elif not len(positions):  # the model runs as it does over text
            encoded.idle.extend(features.tensors())
        elif WORDS in features.side:
            encoded.words.append((positions, features.side[WORDS]))
        elif name.startswith(NATIVE_PREFIX):
            encoded.native[name] = features
        else:
            encoded.inserted.append((positions, features.main))
    return {name: positions for name, (_, positions) in places.items()}


def _features(model: Any, encoded: EncodedPack, component: str) -> MediaFeatures:
    """The features of a component for a pack: those that came, or those of a call for its items."""
    came = encoded.features.get(component)
    if came is not None:
        return came
    model.inference.require(component)
    calls = {name: own_calls(model, encoded.pack, name) for name in model.media_names[component]}
    if component in model.reads:
        rows = _features(model, encoded, model.reads[component])
        calls = {name: reading(items, rows) for name, items in calls.items()}
    features, _ = call_component(model, component, calls)
    return features


def _by_name(
    model: Any,
    features: MediaFeatures,
    batches: Mapping[str, MediaBatch],
    places: Mapping[str, tuple[Tensor, Tensor]],
) -> dict[str, MediaFeatures]:
    """Split the features of a component by name: those of the pack's items, or of this rank's tokens alone."""
    counts: dict[str, Sequence[int]] = {name: [len(index)] for name, (index, _) in places.items()}
    if sum(map(sum, counts.values())) != len(features.main):
        counts = {name: batch.num_tokens for name, batch in batches.items()}
    sizes = [sum(own) for own in counts.values()]
    pieces = zip(*(tensor.split(sizes) for tensor in features.tensors()), strict=True)
    return {
        name: _with_layout_of(model, name, features).with_tensors(piece, own)
        for (name, own), piece in zip(counts.items(), pieces, strict=True)
    }


def filled_up(model: Any, pack: Pack | EncodedPack) -> EncodedPack:
    """Append a sample to a pack that has too few tokens for the ranks that share it; it trains nothing."""
    given = pack if isinstance(pack, EncodedPack) else EncodedPack(pack)
    missing = 0 if given.sequence_slice is None else given.sequence_slice.num_tokens - given.pack.num_tokens
    if not missing:
        return given
    return replace(given, pack=given.pack.followed_by(Pack.from_samples([idle_prompt(model, missing)])))


def idle_prompt(model: Any, num_tokens: int = 2) -> Sample:
    """Return a sample of ordinary tokens without a loss, for a rank of an ``OmniModel`` that has no sample."""
    native, special = model.runner.native, special_ids(model.foundation.config)
    ids = np.full(num_tokens, next(token for token in count() if token not in special), dtype=np.int64)
    trained = np.zeros(num_tokens, dtype=bool)
    extras = native.extras(ids, trained)
    return Sample(_IDLE, _IDLE, ids, trained, native.positions(ids, {}, extras), index=-1, token_inputs=extras)


def call_component(
    model: Any,
    component: str,
    calls: Mapping[str, Sequence[MediaGroup]],
    numbers: Mapping[str, int] = MappingProxyType({}),
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[MediaFeatures, list[Tensor]]:
    """Make this rank's calls of a component.

    Args:
        model: an :class:`omnitrain.models.omni.model.OmniModel`.
        component: name of an encoder or decoder.
        calls: name -> the items of each call.
        numbers: name -> number of calls on every rank; this rank makes those that it lacks with the smallest input.
        around: a context for the calls with items.

    Returns:
        The features of all items, name by name, in the layout of the first; and the tensors of calls without data,
        whose backward must run, too.
    """
    made: list[MediaFeatures] = []
    minimal: list[MediaFeatures] = []
    with recorded(model, What("compute", "encode", "forward", component)), reading_on_host(model.device):
        for name in model.media_names[component]:  # the same order on all ranks, with or without data
            own = calls.get(name, ())
            with around():
                made += [_encoded(model, name, items) for items in own]
            minimal += [_minimal(model, name) for _ in range(numbers.get(name, 0) - len(own))]
    idle = [tensor for features in minimal for tensor in features.tensors() if tensor.is_floating_point()]
    if made:
        return MediaFeatures.cat(made), idle
    return minimal[0].with_tensors([tensor[:0] for tensor in minimal[0].tensors()], ()), idle


def with_all_inputs(pack: Pack, divided: Collection[str], teachers: Mapping[str, Collection[str] | None]) -> Pack:
    """Return a pack in which teachers and the projectors of divided encoders have items, too.

    A projector has the items of its tower, without pixels; a teacher has the samples with text to predict, and gives a
    row for each token from which text is predicted. ``divided``, ``teachers``: see
    :class:`~omnitrain.models.components.model.ComponentModel`. Raises UserError: a sample of a teacher has media.
    """
    names = [name for name in divided if name in pack.inputs and f"{name}.projector" not in pack.inputs]
    pack = replace(pack, inputs=pack.inputs | {f"{n}.projector": _without_data(pack.inputs[n]) for n in names})
    missing = {name: sources for name, sources in teachers.items() if name not in pack.inputs}
    made = {sources: _read_by(pack, sources, teachers) for sources in dict.fromkeys(missing.values())}
    found = {name: items for name, sources in missing.items() if (items := made[sources]) is not None}
    return replace(pack, inputs=pack.inputs | found)


def _read_by(pack: Pack, sources: Collection[str] | None, teachers: Mapping[str, Any]) -> MediaBatch | None:
    """The samples of these sources with text to predict, as a teacher reads them; None: there are none."""
    ends = np.cumsum(pack.info.lengths)
    sample_of = np.searchsorted(ends, pack.text_rows.numpy(), side="right")  # of each row
    is_read = [sources is None or source in sources for source in pack.info.sources]
    rows = pack.text_rows[torch.tensor(is_read, dtype=torch.bool)[sample_of]]
    numbers = np.bincount(sample_of, minlength=len(ends)) * is_read
    read = np.flatnonzero(numbers).tolist()
    if not read:
        return None
    for component, batch in {**pack.inputs, **pack.targets}.items():
        if component not in teachers and (found := sorted({*read} & {*batch.samples})):
            name = next(name for name in teachers if teachers[name] == sources)
            raise UserError(
                f"model.teachers.{name}: a teacher reads text alone, but sample {pack.info.ids[found[0]]} has "
                f"media of {component}; train on text, name its `sources`, or remove the teacher"
            )
    lengths = tuple(pack.info.lengths[index] for index in read)
    tokens = torch.from_numpy(ranges(ends[read] - lengths, np.array(lengths)))
    ids = pack.input_ids[0, to_device(tokens, pack.input_ids.device)]
    samples = tuple(pack.info.ids[index] for index in read)
    features = {"input_ids": ids, "is_read": to_device(torch.isin(tokens, rows), ids.device)}
    group = MediaGroup(features, dict.fromkeys(features, lengths), tuple(numbers[read].tolist()), samples)
    return MediaBatch((group,), rows, tuple(read))


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


_IDLE = "idle"  # source and id of samples for ranks without data; real data may use the same name
_LABELS = "labels"  # name of a decoder's labels among the side tensors of its features


def _encoded(model: Any, name: str, items: MediaGroup) -> MediaFeatures:
    if name.startswith(NATIVE_PREFIX):
        return _with_words(model, name, lambda: model.runner.encode_call(name, items))
    return features_of(_attached(model, name, items))


def _with_words(model: Any, name: str, encode: Callable[[], MediaFeatures]) -> MediaFeatures:
    """The features of a native modality; only the ids if they are words of the vocabulary."""
    interface = model.runner.native.interfaces.get(name.removeprefix(NATIVE_PREFIX))
    if interface is None or not interface.are_words:
        return encode()
    features: MediaFeatures = interface.words(model.foundation, encode)
    return features


def _minimal(model: Any, name: str) -> MediaFeatures:
    features, num_tokens = model.minimal_input(name)
    if name.startswith(NATIVE_PREFIX):
        interface = model.runner.native.interfaces[name.removeprefix(NATIVE_PREFIX)]
        return _with_words(model, name, lambda: interface.encode(model.foundation, features))
    if name in model.reads and any(p.requires_grad for p in model.get_submodule(model.reads[name]).parameters()):
        # As on ranks with data, the module's input gets a gradient: else FSDP would reduce at another time there.
        features = features | {"main": features["main"].detach().requires_grad_()}
    group = MediaGroup(features, {name: (len(tensor),) for name, tensor in features.items()}, num_tokens, (_IDLE,))
    return features_of(_attached(model, name, group))


def _attached(model: Any, name: str, items: MediaGroup) -> Any:
    """The output of an encoder, decoder or teacher; of a divided encoder, that of its tower or its projector."""
    features, num_tokens = items.features, items.num_tokens
    if name in model.teachers:
        return model.get_submodule(name).lm_states(items)
    if name in model.divided:
        return model.get_submodule(name).lm_tower(features, num_tokens)
    if name in model.reads:
        return model.get_submodule(name.removesuffix(".projector")).lm_project(features)
    return model.get_submodule(name).lm_encode(features, num_tokens)


def divided_labels(features: MediaFeatures) -> tuple[MediaFeatures, Tensor | None]:
    """Return a decoder's features without their labels, and the labels ``[n, ...]``; None: these are elsewhere."""
    return replace(features, side={}), features.side.get(_LABELS)


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
