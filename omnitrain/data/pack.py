"""``Pack``: samples laid end to end in one row, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from omnitrain.data.sample import MediaSpan, Sample

IGNORED = -100


@dataclass(frozen=True)
class MediaBatch:
    """All items of one component in a pack.

    Attributes:
        features: the component's arguments; items concatenated along dim 0.
        positions: ``[rows]`` int64, the token that each of the component's rows fills.
        num_tokens: rows per item.
    """

    features: dict[str, torch.Tensor]
    positions: torch.Tensor
    num_tokens: tuple[int, ...]

    def to(self, device: torch.device) -> MediaBatch:
        """The same batch on ``device``."""
        moved = {name: tensor.to(device) for name, tensor in self.features.items()}
        return MediaBatch(moved, self.positions.to(device), self.num_tokens)


@dataclass(frozen=True)
class PackInfo:
    """Host-side facts of a pack, one entry per sample."""

    ids: tuple[str, ...]
    sources: tuple[str, ...]
    lengths: tuple[int, ...]
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Pack:
    """A micro-batch.

    Attributes:
        input_ids: ``[1, T]`` int64.
        position_ids: ``[1, T]`` int64, restarting with every sample.
        cu_seqlens: ``[samples + 1]`` int32, sample borders.
        text_rows: ``[n]`` int64, tokens whose successor is a trained text token.
        text_labels: ``[n]`` int64, those successors (labels are shifted already).
        inputs: encoder name -> items to read.
        targets: decoder name -> items to learn to write.
        info: ids, sources and lengths of the samples.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    text_rows: torch.Tensor
    text_labels: torch.Tensor
    inputs: dict[str, MediaBatch]
    targets: dict[str, MediaBatch]
    info: PackInfo

    @property
    def num_tokens(self) -> int:
        """Tokens in the pack."""
        return self.input_ids.size(1)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sample, tokens."""
        return max(self.info.lengths)

    def loss_counts(self) -> dict[str, int]:
        """Loss name -> number of predicted tokens, known before anything is computed."""
        return {"text": self.text_labels.numel()} | {n: b.positions.numel() for n, b in self.targets.items()}

    def to(self, device: torch.device | str) -> Pack:
        """The same pack with its tensors on ``device``."""
        device = torch.device(device)
        if device == self.input_ids.device:
            return self
        return Pack(
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            text_rows=self.text_rows.to(device),
            text_labels=self.text_labels.to(device),
            inputs={name: batch.to(device) for name, batch in self.inputs.items()},
            targets={name: batch.to(device) for name, batch in self.targets.items()},
            info=self.info,
        )

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> Pack:
        """Lay samples end to end, sorted by length so that attention can batch equal ones.

        Raises:
            ValueError: no samples.
        """
        if not samples:
            raise ValueError("a pack needs at least one sample")
        ordered = sorted(samples, key=lambda sample: (len(sample), sample.index))
        borders = [0, *accumulate(len(sample) for sample in ordered)]
        ids = np.concatenate([sample.input_ids for sample in ordered])
        text_rows = np.concatenate(
            [start + np.flatnonzero(sample.loss_mask[1:]) for start, sample in zip(borders, ordered, strict=False)]
        )
        placed = [(start, span) for start, sample in zip(borders, ordered, strict=False) for span in sample.spans]
        return cls(
            input_ids=torch.from_numpy(ids)[None],
            position_ids=torch.from_numpy(np.concatenate([sample.position_ids for sample in ordered]))[None],
            cu_seqlens=torch.tensor(borders, dtype=torch.int32),
            text_rows=torch.from_numpy(text_rows),
            text_labels=torch.from_numpy(ids[text_rows + 1]),
            inputs=_media_batches([entry for entry in placed if not entry[1].is_target]),
            targets=_media_batches([entry for entry in placed if entry[1].is_target]),
            info=PackInfo(
                ids=tuple(sample.id for sample in ordered),
                sources=tuple(sample.source for sample in ordered),
                lengths=tuple(len(sample) for sample in ordered),
                indices=tuple(sample.index for sample in ordered),
            ),
        )


def _media_batches(placed: list[tuple[int, MediaSpan]]) -> dict[str, MediaBatch]:
    by_component: dict[str, list[tuple[int, MediaSpan]]] = {}
    for entry in placed:
        by_component.setdefault(entry[1].component, []).append(entry)
    return {name: _media_batch(entries) for name, entries in sorted(by_component.items())}


def _media_batch(entries: list[tuple[int, MediaSpan]]) -> MediaBatch:
    items = [span.item for _, span in entries]
    positions = np.concatenate(
        [np.arange(start + span.start, start + span.start + span.item.num_tokens) for start, span in entries]
    )
    features = {
        name: torch.from_numpy(np.concatenate([item.features[name] for item in items])) for name in items[0].features
    }
    return MediaBatch(features, torch.from_numpy(positions), tuple(item.num_tokens for item in items))
