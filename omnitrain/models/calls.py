"""The calls of a component that the items of a pack ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from omnitrain.data.pack import MediaBatch, MediaGroup


@dataclass(frozen=True)
class MediaCall:
    """What one call of a component encodes.

    Attributes:
        items: those that stack together.
        samples: id of the sample of each item, for messages.
    """

    items: MediaGroup
    samples: tuple[str, ...]


def media_calls(batch: MediaBatch, ids: Sequence[str], *, by_sample: bool = False) -> Iterator[MediaCall]:
    """One call per group of a batch.

    Args:
        batch: items of a component.
        ids: of the samples in its pack.
        by_sample: never the items of two samples in one call.
    """
    owners = iter(batch.samples)
    for group in batch.groups:
        samples = [next(owners) for _ in group.num_tokens]
        sizes = [len(list(run)) for _, run in groupby(samples)] if by_sample else [len(samples)]
        names = iter(samples)
        for part in group.split(sizes):
            yield MediaCall(part, tuple(ids[next(names)] for _ in part.num_tokens))
