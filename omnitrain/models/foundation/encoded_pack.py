"""``EncodedPack``: a pack with the features of its media, the input of the foundation and of the heads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from omnitrain.data.packing.pack import Pack
from omnitrain.models.discovery import MediaFeatures
from omnitrain.ops.attention.packed_context import SequenceSlice


@dataclass(frozen=True)
class EncodedPack:
    """A micro-batch in a forward of a rank: its pack, the rank's part of the work, and the features of its media.

    Positions are ``[n]`` int64 in the flattened batch ``[B * T]``, on the host.

    Attributes:
        pack: the samples, long enough for all ranks that share them.
        native: modality -> features for the foundation's own placeholders, in the order of the placeholders.
        sequence_slice: the tokens of the pack over which this rank runs the foundation; None: all of them.
        heads: decoders whose head every rank calls, with targets or without.
        apart: decoders whose losses other ranks compute; the hidden states that these need are in the output.
        features: component -> its features for this pack, name by name: for all tokens, or for those of this rank. The
            forward calls the components without an entry.
        inserted: features of attached components, ``[n, hidden]``, with the positions whose embeddings they replace.
        words: ids ``[n]`` of media that are words of the vocabulary, with the positions of their placeholders.
        teachers: teacher -> tokens from which this rank predicts text, and its last hidden states ``[n, width]``.
        labels: decoder -> labels ``[n, ...]``, of the whole pack.
        idle: results of calls without data; they enter the loss with a factor of zero.
    """

    pack: Pack
    native: dict[str, MediaFeatures] = field(default_factory=dict)
    sequence_slice: SequenceSlice | None = None
    heads: Collection[str] = ()
    apart: Collection[str] = ()
    features: Mapping[str, MediaFeatures] = field(default_factory=dict)
    inserted: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    words: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    teachers: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)
    idle: list[Tensor] = field(default_factory=list)
