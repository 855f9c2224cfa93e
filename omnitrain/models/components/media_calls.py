"""Split the items of a pack into calls of a component."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from typing import Literal

from omnitrain.data.packing.pack import MediaBatch, MediaGroup
from omnitrain.plan.ragged import runs_within

Apart = Literal["samples", "items"]


def media_calls(
    batch: MediaBatch, *, apart: Apart | None = None, most_elements: int | None = None
) -> Iterator[MediaGroup]:
    """Yield the items of each call for a batch: one call per group, or several.

    ``apart``: a call has items of only one sample, or only one item. ``most_elements``: most input elements of a call;
    a larger item has a call of its own. None: no limit.
    """
    owners = iter(batch.samples)
    for group in batch.groups:
        samples = [next(owners) for _ in group.num_tokens]
        sizes = [len(samples)]
        if apart is not None:
            sizes = [len(list(run)) for _, run in groupby(samples)] if apart == "samples" else [1] * len(samples)
        if most_elements is not None:
            elements = iter(group.num_elements)
            sizes = [run for size in sizes for run in runs_within(islice(elements, size), most_elements)]
        yield from group.split(sizes)
