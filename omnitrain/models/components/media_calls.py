"""The calls of a component that the items of a pack ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from omnitrain.data.pack import MediaBatch, MediaGroup

Apart = Literal["samples", "items"]


@dataclass(frozen=True)
class MediaCall:
    """What one call of a component encodes.

    Attributes:
        items: those that stack together.
        samples: id of the sample of each item, for messages.
    """

    items: MediaGroup
    samples: tuple[str, ...]


def media_calls(batch: MediaBatch, ids: Sequence[str], *, apart: Apart | None = None) -> Iterator[MediaCall]:
    """One call per group of a batch, or several.

    Args:
        batch: items of a component.
        ids: of the samples in its pack.
        apart: what no call may have two of.
    """
    owners = iter(batch.samples)
    for group in batch.groups:
        samples = [next(owners) for _ in group.num_tokens]
        sizes = [len(samples)]
        if apart is not None:
            sizes = [len(list(run)) for _, run in groupby(samples)] if apart == "samples" else [1] * len(samples)
        names = iter(samples)
        for part in group.split(sizes):
            yield MediaCall(part, tuple(ids[next(names)] for _ in part.num_tokens))
