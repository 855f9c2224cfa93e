"""``Pack``: samples concatenated into one sequence, without padding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from omnitrain.data.packing.sample import SEEDS, Features, MediaSpan, Sample
from omnitrain.ops.draws import mixed_seed
from omnitrain.ops.host_values import rows_of, to_device

IGNORED = -100


@dataclass(frozen=True)
class MediaGroup:
    """Items that one call of a component can take: their features have equal names, dtypes and trailing shapes."""

    features: dict[str, torch.Tensor]  # the component's arguments, with items concatenated along dim 0
    num_rows: dict[str, tuple[int, ...]]  # argument name -> dim-0 rows of each item
    num_tokens: tuple[int, ...]  # of each item in the sequence
    samples: tuple[str, ...]  # sample id of each item, for messages

    @property
    def num_elements(self) -> tuple[int, ...]:
        """Number of input elements of each item."""
        per_row = {name: tensor[:1].numel() for name, tensor in self.features.items()}
        of_names = [[count * per_row[name] for count in counts] for name, counts in self.num_rows.items()]
        return tuple(map(sum, zip(*of_names, strict=True))) if of_names else (0,) * len(self.num_tokens)

    def split(self, sizes: Sequence[int]) -> Iterator[MediaGroup]:
        """Yield runs of ``sizes`` items as separate groups, for components that must not get all items at once."""
        for start, stop in pairwise((0, *accumulate(sizes))):
            rows = {name: counts[start:stop] for name, counts in self.num_rows.items()}
            first = {name: sum(counts[:start]) for name, counts in self.num_rows.items()}
            features = {name: rows_of(t, first[name], sum(rows[name])) for name, t in self.features.items()}
            yield MediaGroup(features, rows, self.num_tokens[start:stop], self.samples[start:stop])

    def to(self, device: torch.device) -> MediaGroup:
        """Return the group on ``device``."""
        return replace(self, features={name: to_device(tensor, device) for name, tensor in self.features.items()})


@dataclass(frozen=True)
class MediaBatch:
    """All items of a component; ``positions``: ``[rows]`` int64, token of each output row, in order, on the host."""

    groups: tuple[MediaGroup, ...]  # the items by shape; usually one group, and no item is ever padded
    positions: torch.Tensor
    samples: tuple[int, ...]  # index in the pack of each item's sample, in the same order
    is_block: bool = False  # see ``MediaItem``

    @property
    def predicted_from(self) -> torch.Tensor:
        """``[rows]`` int64: the token from whose state a head predicts each of the tokens; on the host."""
        return self.positions if self.is_block else self.positions - 1

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens per item, in order of groups and items."""
        return tuple(count for group in self.groups for count in group.num_tokens)

    def to(self, device: torch.device) -> MediaBatch:
        """Return the batch with its features on ``device``."""
        return replace(self, groups=tuple(group.to(device) for group in self.groups))


@dataclass(frozen=True)
class PackInfo:
    """Facts about the samples of a pack, one entry per sample, on the host; see :class:`Sample`."""

    ids: tuple[str, ...]
    sources: tuple[str, ...]
    lengths: tuple[int, ...]
    indices: tuple[int, ...]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> PackInfo:
        """Take the facts of samples in the order of the pack."""
        facts = ((sample.id, sample.source, len(sample), sample.index) for sample in samples)
        return cls(*zip(*facts, strict=True))


@dataclass(frozen=True)
class Pack:
    """A micro-batch.

    Indices of tokens (``text_rows``, positions of media) always stay on the host. Facts that follow from them, such as
    which tokens are on a rank, are then known without waiting for a device.
    """

    input_ids: torch.Tensor  # `[1, T]` int64
    position_ids: torch.Tensor  # `[1, T]` int64, or `[axes, 1, T]`; they restart with every sample
    cu_seqlens: torch.Tensor  # `[samples + 1]` int32, offsets of the samples
    text_rows: torch.Tensor  # `[n]` int64, indices of tokens whose next token is a trained text token; on the host
    text_labels: torch.Tensor  # `[n]` int64, those next tokens (labels are already shifted)
    inputs: dict[str, MediaBatch]  # encoder name -> items to read
    targets: dict[str, MediaBatch]  # decoder name -> items to learn to write
    info: PackInfo  # ids, sources and lengths of the samples
    token_inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # of the forward, [1, T] each
    forward_inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # of a sample that the forward reads alone

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the pack."""
        return self.input_ids.size(1)

    @property
    def read_rows(self) -> torch.Tensor:
        """``[n]`` int64, on the host: tokens from which heads predict, each once."""
        others = [batch.predicted_from for batch in self.targets.values()]
        own = [rows[~torch.isin(rows, self.text_rows)] if self.block_ids is not None else rows for rows in others]
        return torch.cat([self.text_rows, *own])

    @property
    def block_ids(self) -> torch.Tensor | None:
        """``[1, T]`` int64: for tokens of blocks the number of the block, from 1, else 0; None: there are no blocks."""
        blocks = [batch for batch in self.targets.values() if batch.is_block]
        if not blocks:
            return None
        ids, first = torch.zeros_like(self.input_ids), 1
        for batch in blocks:
            numbers = torch.arange(first, first + len(batch.num_tokens))
            counts = torch.tensor(batch.num_tokens)
            ids[0, to_device(batch.positions, ids.device)] = to_device(numbers.repeat_interleave(counts), ids.device)
            first += len(numbers)
        return ids

    def loss_counts(self) -> dict[str, int]:
        """Return loss name -> number of predicted tokens."""
        return {"text": self.text_labels.numel()} | {n: b.positions.numel() for n, b in self.targets.items()}

    def to(self, device: torch.device | str) -> Pack:
        """Return the pack on ``device``. Indices of tokens stay on the host."""
        device = torch.device(device)
        if device == self.input_ids.device:
            return self
        tensors = ("input_ids", "position_ids", "cu_seqlens", "text_labels")
        moved: dict[str, Any] = {name: to_device(getattr(self, name), device) for name in tensors}
        for name in ("inputs", "targets"):
            moved[name] = {component: batch.to(device) for component, batch in getattr(self, name).items()}
        for name in ("token_inputs", "forward_inputs"):
            moved[name] = {key: to_device(tensor, device) for key, tensor in getattr(self, name).items()}
        return replace(self, **moved)

    def followed_by(self, text: Pack) -> Pack:
        """Return the pack with further samples without media or labels at its end, which train nothing."""
        text = text.to(self.input_ids.device)
        tokens = {name: torch.cat([own, text.token_inputs[name]], dim=-1) for name, own in self.token_inputs.items()}
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, text.input_ids], dim=-1),
            position_ids=torch.cat([self.position_ids, text.position_ids], dim=-1),
            cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens[-1] + text.cu_seqlens[1:]]),
            token_inputs=tokens,
            info=PackInfo(**{name: own + getattr(text.info, name) for name, own in vars(self.info).items()}),
        )

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> Pack:
        """Concatenate samples, sorted by length; ValueError: there are none, or they cannot share a pack."""
        if not samples:
            raise ValueError("a pack needs at least one sample")
        _check_alike(samples)
        ordered = sorted(samples, key=lambda sample: (len(sample), sample.index))
        offsets = [0, *accumulate(len(sample) for sample in ordered)]
        predicting = [np.flatnonzero(sample.loss_mask[1:]) for sample in ordered]
        text_rows = [start + tokens for start, tokens in zip(offsets, predicting, strict=False)]
        text_labels = [sample.input_ids[tokens + 1] for tokens, sample in zip(predicting, ordered, strict=True)]
        media = [
            _PackedSpan(i, sample, start + span.positions, span)
            for i, (start, sample) in enumerate(zip(offsets, ordered, strict=False))
            for span in sample.spans
        ]
        return cls(
            input_ids=_concatenated(ordered, lambda sample: sample.input_ids),
            position_ids=_concatenated(ordered, lambda sample: sample.position_ids),
            cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
            text_rows=torch.from_numpy(np.concatenate(text_rows)),
            text_labels=torch.from_numpy(np.concatenate(text_labels)),
            inputs=_media_batches(media, is_target=False),
            targets=_media_batches(media, is_target=True),
            info=PackInfo.of(ordered),
            token_inputs={
                name: _concatenated(ordered, lambda sample, name=name: sample.token_inputs[name])  # type: ignore[misc]
                for name in ordered[0].token_inputs
            },
            forward_inputs={name: torch.from_numpy(array) for name, array in ordered[0].forward_inputs.items()},
        )


class _PackedSpan(NamedTuple):
    place: int  # of the sample in the pack
    sample: Sample
    positions: np.ndarray
    span: MediaSpan

    @property
    def features(self) -> Features:
        """The features of the item, with its seeds."""
        features, sample = self.span.item.features, self.sample
        if SEEDS not in features or sample.seed is None:
            return features
        seed = mixed_seed(sample.seed, sample.index, sample.piece, self.span.start)
        seeds = np.uint64(seed) + np.arange(self.span.item.num_tokens, dtype=np.uint64)  # wraps around
        return features | {SEEDS: seeds.view(np.int64)}


def _check_alike(samples: Sequence[Sample]) -> None:
    first = samples[0]
    for sample in samples[1:]:
        if sample.is_alone or first.is_alone:
            reason = "the model's own forward reads one of them, which must be alone"
        elif sample.position_ids.shape[:-1] != first.position_ids.shape[:-1]:
            reason = f"position ids {sample.position_ids.shape} and {first.position_ids.shape}"
        elif sample.token_inputs.keys() != first.token_inputs.keys():
            reason = f"per-token arguments {sorted(sample.token_inputs)} and {sorted(first.token_inputs)}"
        else:
            continue
        raise ValueError(f"samples {sample.id!r} and {first.id!r} cannot share a pack: {reason}")


def _concatenated(samples: Sequence[Sample], values_of: Callable[[Sample], np.ndarray]) -> torch.Tensor:
    """Concatenate the values ``[..., T]`` of each sample's input tokens to ``[..., 1, T]``."""
    of_inputs = [values_of(sample)[..., : len(sample)] for sample in samples]
    return torch.from_numpy(np.concatenate(of_inputs, axis=-1)).unsqueeze(-2)


def _media_batches(spans: list[_PackedSpan], *, is_target: bool) -> dict[str, MediaBatch]:
    chosen = [entry for entry in spans if entry.span.is_target == is_target]
    by_component = _grouped(chosen, lambda entry: entry.span.component)
    return {name: _media_batch(entries) for name, entries in sorted(by_component.items())}


def _media_batch(spans: list[_PackedSpan]) -> MediaBatch:
    groups = list(_grouped(spans, _stacking_key).values())
    ordered = [entry for group in groups for entry in group]
    return MediaBatch(
        groups=tuple(map(_media_group, groups)),
        positions=torch.from_numpy(np.concatenate([entry.positions for entry in ordered])),
        samples=tuple(entry.place for entry in ordered),
        is_block=ordered[0].span.item.is_block,
    )


def _stacking_key(entry: _PackedSpan) -> tuple[Any, ...]:
    """Return a key that is equal for items whose arrays can be concatenated along dim 0."""
    arrays = sorted(entry.span.item.features.items())
    return tuple((name, array.dtype, array.shape[1:]) for name, array in arrays)


def _media_group(spans: list[_PackedSpan]) -> MediaGroup:
    items = [entry.features for entry in spans]
    return MediaGroup(
        features={name: torch.from_numpy(np.concatenate([item[name] for item in items])) for name in items[0]},
        num_rows={name: tuple(len(item[name]) for item in items) for name in items[0]},
        num_tokens=tuple(entry.span.item.num_tokens for entry in spans),
        samples=tuple(entry.sample.id for entry in spans),
    )


def _grouped(spans: list[_PackedSpan], key: Callable[[_PackedSpan], Hashable]) -> dict[Any, list[_PackedSpan]]:
    groups: dict[Any, list[_PackedSpan]] = {}
    for entry in spans:
        groups.setdefault(key(entry), []).append(entry)
    return groups
