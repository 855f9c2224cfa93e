"""Split the items of a pack into calls of a component."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from omnitrain.data.packing.pack import MediaBatch, MediaGroup

Apart = Literal["samples", "items"]


@dataclass(frozen=True)
class MediaCall:
    """The items of one call of a component.

    Attributes:
        items: items that can be stacked.
        samples: sample id of each item, for messages.
    """

    items: MediaGroup
    samples: tuple[str, ...]


def media_calls(batch: MediaBatch, ids: Sequence[str], *, apart: Apart | None = None) -> Iterator[MediaCall]:
    """Yield the calls for a batch: one per group, or several.

    Args:
        batch: items of a component.
        ids: sample ids of its pack.
        apart: a call has items of only one sample, or only one item; None: no limit.
    """
    owners = iter(batch.samples)
    for group in batch.groups:
        samples = [next(owners) for _ in group.num_tokens]
        sizes = [len(samples)]
        if apart is not None:
            sizes = [len(list(run)) for _, run in groupby(samples)] if apart == "samples" else [1] * len(samples)
        names = iter(samples)
        for items in group.split(sizes):
            yield MediaCall(items, tuple(ids[next(names)] for _ in items.num_tokens))
