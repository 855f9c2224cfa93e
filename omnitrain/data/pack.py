"""``Pack``: samples laid end to end in one row, without padding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from omnitrain.data.sample import MediaItem, MediaSpan, Sample
from omnitrain.ops.device import to_device

IGNORED = -100


@dataclass(frozen=True)
class MediaGroup:
    """Items of one component that stack without padding: features of the same names, types and trailing shapes.

    Attributes:
        features: the component's arguments; items concatenated along dim 0.
        num_rows: feature -> dim-0 rows of each item.
        num_tokens: rows that the component makes of each item.
    """

    features: dict[str, torch.Tensor]
    num_rows: dict[str, tuple[int, ...]]
    num_tokens: tuple[int, ...]

    def split(self, sizes: Sequence[int]) -> Iterator[MediaGroup]:
        """Runs of so many items as groups of their own, for components that must not see all at once."""
        for start, stop in pairwise((0, *accumulate(sizes))):
            rows = {name: counts[start:stop] for name, counts in self.num_rows.items()}
            first = {name: sum(counts[:start]) for name, counts in self.num_rows.items()}
            features = {name: t.narrow(0, first[name], sum(rows[name])) for name, t in self.features.items()}
            yield MediaGroup(features, rows, self.num_tokens[start:stop])

    def to(self, device: torch.device) -> MediaGroup:
        """The same items on ``device``."""
        there = {name: to_device(tensor, device) for name, tensor in self.features.items()}
        return MediaGroup(there, self.num_rows, self.num_tokens)


@dataclass(frozen=True)
class MediaBatch:
    """All items of one component in a pack.

    Attributes:
        groups: the items, those of one shape together; usually one group. No item is ever padded.
        positions: ``[rows]`` int64, the token that each of the component's rows fills, in order of groups and items;
            always on the host.
        samples: index in the pack of each item's sample, in the same order.
    """

    groups: tuple[MediaGroup, ...]
    positions: torch.Tensor
    samples: tuple[int, ...]

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Rows per item, in order of groups and items."""
        return tuple(count for group in self.groups for count in group.num_tokens)

    def to(self, device: torch.device) -> MediaBatch:
        """The same batch with its features on ``device``."""
        return MediaBatch(tuple(group.to(device) for group in self.groups), self.positions, self.samples)


@dataclass(frozen=True)
class PackInfo:
    """Host-side facts of a pack, one entry per sample; see :class:`Sample`."""

    ids: tuple[str, ...]
    sources: tuple[str, ...]
    lengths: tuple[int, ...]
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Pack:
    """A micro-batch.

    Which rows are meant (``text_rows``, positions of media) stays on the host wherever the rest is: what depends on it,
    such as what of a row is on a rank, is then known without waiting for a device.

    Attributes:
        input_ids: ``[1, T]`` int64.
        position_ids: ``[1, T]`` int64, or ``[axes, 1, T]``; restarting with every sample.
        cu_seqlens: ``[samples + 1]`` int32, sample borders.
        text_rows: ``[n]`` int64, tokens whose successor is a trained text token; on the host.
        text_labels: ``[n]`` int64, those successors (labels are shifted already).
        inputs: encoder name -> items to read.
        targets: decoder name -> items to learn to write.
        info: ids, sources and lengths of the samples.
        token_inputs: further per-token arguments of the foundation's forward, ``[1, T]`` each.
        forward_inputs: all further arguments of that forward, of a sample that is read there, alone in its pack; such a
            sample's ``position_ids`` are not used.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    text_rows: torch.Tensor
    text_labels: torch.Tensor
    inputs: dict[str, MediaBatch]
    targets: dict[str, MediaBatch]
    info: PackInfo
    token_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    forward_inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens in the pack."""
        return self.input_ids.size(1)

    @property
    def read_rows(self) -> torch.Tensor:
        """``[n]`` int64, on the host: rows from which a head predicts, each once, for each has one successor."""
        return torch.cat([self.text_rows, *(batch.positions - 1 for batch in self.targets.values())])

    def loss_counts(self) -> dict[str, int]:
        """Loss name -> number of predicted tokens, known before anything is computed."""
        return {"text": self.text_labels.numel()} | {n: b.positions.numel() for n, b in self.targets.items()}

    def to(self, device: torch.device | str) -> Pack:
        """The same pack on ``device``, but for what stays on the host."""
        device = torch.device(device)
        if device == self.input_ids.device:
            return self
        return Pack(
            input_ids=to_device(self.input_ids, device),
            position_ids=to_device(self.position_ids, device),
            cu_seqlens=to_device(self.cu_seqlens, device),
            text_rows=self.text_rows,
            text_labels=to_device(self.text_labels, device),
            inputs={name: batch.to(device) for name, batch in self.inputs.items()},
            targets={name: batch.to(device) for name, batch in self.targets.items()},
            info=self.info,
            token_inputs={name: to_device(tensor, device) for name, tensor in self.token_inputs.items()},
            forward_inputs={name: to_device(tensor, device) for name, tensor in self.forward_inputs.items()},
        )

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> Pack:
        """Lay samples end to end, sorted by length so that attention can batch equal ones.

        Raises:
            ValueError: no samples, or several that differ in position axes or per-token arguments, or must be alone.
        """
        if not samples:
            raise ValueError("a pack needs at least one sample")
        _check_alike(samples)
        ordered = sorted(samples, key=lambda sample: (len(sample), sample.index))
        borders = [0, *accumulate(len(sample) for sample in ordered)]
        read = [np.flatnonzero(sample.loss_mask[1:]) for sample in ordered]
        text_rows = [start + rows for start, rows in zip(borders, read, strict=False)]
        text_labels = [sample.input_ids[rows + 1] for rows, sample in zip(read, ordered, strict=True)]
        placed = [
            _Placed(i, start + span.positions, span)
            for i, (start, sample) in enumerate(zip(borders, ordered, strict=False))
            for span in sample.spans
        ]
        return cls(
            input_ids=_row([sample.input_ids for sample in ordered], ordered),
            position_ids=_row([sample.position_ids for sample in ordered], ordered),
            cu_seqlens=torch.tensor(borders, dtype=torch.int32),
            text_rows=torch.from_numpy(np.concatenate(text_rows)),
            text_labels=torch.from_numpy(np.concatenate(text_labels)),
            inputs=_media_batches([entry for entry in placed if not entry.span.is_target]),
            targets=_media_batches([entry for entry in placed if entry.span.is_target]),
            info=PackInfo(
                ids=tuple(sample.id for sample in ordered),
                sources=tuple(sample.source for sample in ordered),
                lengths=tuple(len(sample) for sample in ordered),
                indices=tuple(sample.index for sample in ordered),
            ),
            token_inputs={
                name: _row([sample.token_inputs[name] for sample in ordered], ordered)
                for name in ordered[0].token_inputs
            },
            forward_inputs={name: torch.from_numpy(array) for name, array in ordered[0].forward_inputs.items()},
        )


class _Placed(NamedTuple):
    sample: int
    positions: np.ndarray
    span: MediaSpan


def _check_alike(samples: Sequence[Sample]) -> None:
    first = samples[0]
    for sample in samples[1:]:
        if sample.is_alone or first.is_alone:
            found = "the model's own forward reads one of them, which must be alone"
        elif sample.position_ids.shape[:-1] != first.position_ids.shape[:-1]:
            found = f"position ids {sample.position_ids.shape} and {first.position_ids.shape}"
        elif sample.token_inputs.keys() != first.token_inputs.keys():
            found = f"per-token arguments {sorted(sample.token_inputs)} and {sorted(first.token_inputs)}"
        else:
            continue
        raise ValueError(f"samples {sample.id!r} and {first.id!r} cannot share a pack: {found}")


def _row(values: Sequence[np.ndarray], samples: Sequence[Sample]) -> torch.Tensor:
    """Values of the tokens that the model is given, ``[..., T]`` of each sample, as one row ``[..., 1, T]``."""
    given = [own[..., : len(sample)] for own, sample in zip(values, samples, strict=True)]
    return torch.from_numpy(np.concatenate(given, axis=-1)).unsqueeze(-2)


def _media_batches(placed: list[_Placed]) -> dict[str, MediaBatch]:
    by_component = _grouped(placed, lambda entry: entry.span.component)
    return {name: _media_batch(entries) for name, entries in sorted(by_component.items())}


def _media_batch(placed: list[_Placed]) -> MediaBatch:
    groups = list(_grouped(placed, lambda entry: _stacking_key(entry.span.item)).values())
    ordered = [entry for group in groups for entry in group]
    return MediaBatch(
        groups=tuple(_media_group([entry.span.item for entry in group]) for group in groups),
        positions=torch.from_numpy(np.concatenate([entry.positions for entry in ordered])),
        samples=tuple(entry.sample for entry in ordered),
    )


def _stacking_key(item: MediaItem) -> tuple[Any, ...]:
    return tuple((name, array.dtype, array.shape[1:]) for name, array in sorted(item.features.items()))


def _media_group(items: list[MediaItem]) -> MediaGroup:
    names = items[0].features
    return MediaGroup(
        features={name: torch.from_numpy(np.concatenate([item.features[name] for item in items])) for name in names},
        num_rows={name: tuple(len(item.features[name]) for item in items) for name in names},
        num_tokens=tuple(item.num_tokens for item in items),
    )


def _grouped(placed: list[_Placed], key: Callable[[_Placed], Hashable]) -> dict[Any, list[_Placed]]:
    groups: dict[Any, list[_Placed]] = {}
    for entry in placed:
        groups.setdefault(key(entry), []).append(entry)
    return groups
