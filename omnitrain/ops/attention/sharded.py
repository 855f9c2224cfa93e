"""Attention over a row of which each rank has a part: what a mask or borders say of it, and what computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from omnitrain.ops.attention.spec import Call


class SequenceShard(Protocol):
    """This rank's part of a row, and the ranks that have the others."""

    @property
    def num_rows(self) -> int:
        """Tokens of the row that this rank has."""
        ...

    def attend(self, call: Call, compute: Callable[[Call], torch.Tensor]) -> torch.Tensor:
        """Attend from this rank's rows to the whole row. All ranks of the row call it together.

        Args:
            call: queries, keys and values ``[1, heads, own rows, width]`` of this rank's rows; all else of the whole
                row and of all heads.
            compute: attention ``[1, T, heads, E]`` of a call over a row that is all there, of some of the heads.

        Returns:
            ``[1, own rows, H, E]``.
        """
        ...


# Tensor of borders -> what of their row is on this rank.
_shards = WeakTensorKeyDictionary()


def borders_on(cu_seqlens: torch.Tensor, shard: SequenceShard) -> torch.Tensor:
    """A copy of the borders of a row; layers that are given it as ``cu_seq_lens_q`` attend from a part of the row.

    Args:
        cu_seqlens: ``[segments + 1]`` int32 or int64, of the whole row.
        shard: the part.
    """
    own = cu_seqlens.clone()
    _shards[own] = shard
    return own


def shard_of(cu_seqlens: torch.Tensor) -> SequenceShard | None:
    """The part that :func:`borders_on` named; None: these are the borders of a row that is all there."""
    found: SequenceShard | None = _shards.get(cu_seqlens)
    return found
