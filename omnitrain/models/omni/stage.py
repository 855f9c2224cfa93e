"""A pipeline stage of an omni model: which features it gets and hands on, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import NATIVE_PREFIX
from omnitrain.models.discovery import MediaFeatures
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.sequence_slice import local_positions
from omnitrain.models.foundation.stage import BlockSpan
from omnitrain.models.omni.encode import encode
from omnitrain.ops.attention.packed_context import SequenceSlice

Across = tuple[str, str]  # modality, name of the tensor in the layout of its features


@dataclass(frozen=True)
class StageInput:
    """The input of a stage besides its pack."""

    span: BlockSpan  # the blocks of the stage
    arrived: tuple[Tensor, ...] = ()  # states `[1, t, hidden]`, features as of `features_across`; first stage: none


def features_in(model: Any, pack: Pack, sequence_slice: SequenceSlice | None) -> dict[str, int]:
    """Return modality that the foundation reads by itself -> number of its features for this rank's tokens.

    Modalities that share a placeholder count as the first of them, as in :class:`EncodedPack`.
    """
    numbers: dict[str, int] = {}
    first: dict[int, str] = {}
    for name in (name for names in model.media_names.values() for name in names):
        if name.startswith(NATIVE_PREFIX) and name in pack.inputs:
            modality = name.removeprefix(NATIVE_PREFIX)
            if model.runner.native.interfaces[modality].are_words:
                continue
            if number := len(local_positions(sequence_slice, pack.inputs[name].positions)[0]):
                key = first.setdefault(model.runner.native.interfaces[modality].token_id, modality)
                numbers[key] = numbers.get(key, 0) + number
    return numbers


def features_across(model: Any, pack: Pack, sequence_slice: SequenceSlice | None, cut: int) -> dict[Across, int]:
    """Return the features that cross ``cut``, the index of the block after it, with their number, as they are sent."""
    contract = model.stage_contract
    across: dict[Across, int] = {}
    for modality, number in features_in(model, pack, sequence_slice).items():
        main, *side = model.runner.native.interfaces[modality].layout.names
        names = [main] if contract.needs_embeddings else []
        names += [name for name in side if contract.levels.get(name, cut) >= cut]
        across |= {(modality, name): number for name in names}
    return across


def arrived_pack(model: Any, given: EncodedPack, stage: StageInput) -> EncodedPack:
    """Return the input of a stage after the first: features that arrived; on the last, labels and teachers' states."""
    pack, sequence_slice, (hidden, *features) = given.pack, given.sequence_slice, stage.arrived
    here = dict(zip(features_across(model, pack, sequence_slice, stage.span.start), features, strict=True))
    native = {}
    for modality, number in features_in(model, pack, sequence_slice).items():
        layout = model.runner.native.interfaces[modality].layout
        absent = hidden.detach().new_zeros(()).expand(number, hidden.size(-1))
        main, *side = (here.get((modality, name), absent) for name in layout.names)
        native[modality] = MediaFeatures(main, dict(zip(layout.names[1:], side, strict=True)), {}, (number,), layout)
    there = given
    if stage.span.is_last:
        with torch.no_grad():  # the first stage has the embeddings
            there = encode(model, given, {*model.decoder_names, *model.teachers}.difference(given.apart))
    return replace(there, native=native, idle=[])


def handed_on(model: Any, encoded: EncodedPack, hidden: Tensor, cut: int) -> tuple[Tensor, ...]:
    """Return what a stage sends to the next one: ``hidden``, then features as of :func:`features_across`."""
    sent = [hidden]
    for modality, name in features_across(model, encoded.pack, encoded.sequence_slice, cut):
        features = encoded.native[modality]
        sent.append(dict(zip(features.layout.names, features.tensors(), strict=True))[name])
    return tuple(sent)
