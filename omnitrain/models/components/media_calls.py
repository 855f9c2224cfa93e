"""Split the items of a pack into calls of a component."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Literal

from omnitrain.data.packing.pack import MediaBatch, MediaGroup

Apart = Literal["samples", "items"]


def media_calls(batch: MediaBatch, *, apart: Apart | None = None) -> Iterator[MediaGroup]:
    """Yield the items of each call for a batch: one call per group, or several.

    Args:
        batch: items of a component.
        apart: a call has items of only one sample, or only one item; None: no limit.
    """
    owners = iter(batch.samples)
    for group in batch.groups:
        samples = [next(owners) for _ in group.num_tokens]
        sizes = [len(samples)]
        if apart is not None:
            sizes = [len(list(run)) for _, run in groupby(samples)] if apart == "samples" else [1] * len(samples)
        yield from group.split(sizes)
