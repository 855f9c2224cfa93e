"""Split a packed sequence among the ranks that share it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omnitrain.errors import UserError


@dataclass(frozen=True, eq=False)
class SequenceSplit:
    """A packed sequence split among ``cp x sp`` ranks. :func:`split_sequence` makes one.

    With cp=2 and sp=2, and a letter per rank::

        token   0 1 2 3 4 5 6 7
        rank    A A C C D D B B      A, B: cp rank 0 (chunks 0 and 3 of 4); C, D: cp rank 1 (chunks 1 and 2)
    """

    num_tokens: int  # tokens of the whole sequence
    sp: int  # ranks that exchange tokens for heads (Ulysses)
    cp: int  # ranks of the attention ring
    # for each rank ``cp_rank * sp + sp_rank``: ``[tokens of the rank]`` int64, ascending token indices
    positions: tuple[np.ndarray, ...]

    def positions_of_ring(self, cp_rank: int) -> tuple[np.ndarray, ...]:
        """Return ``positions`` of the sp ranks of one cp rank; concatenated, they ascend."""
        return self.positions[cp_rank * self.sp : (cp_rank + 1) * self.sp]

    def chunks(self, cp_rank: int) -> tuple[tuple[int, int], ...]:
        """Return ``(start, stop)`` of the one or two runs of tokens on a cp rank, ascending."""
        return _chunks(self.num_tokens, self.cp, cp_rank)


def split_sequence(num_tokens: int, *, sp: int, cp: int = 1) -> SequenceSplit:
    """Split a sequence of ``num_tokens`` among ``cp x sp`` ranks, or raise UserError if these are more.

    The sequence is cut into 2 cp nearly equal chunks. Cp rank c gets chunks c and 2 cp - 1 - c, so that all cp ranks
    have about the same work under a causal mask. Its sp ranks get nearly equal runs of its tokens.
    """
    if num_tokens < sp * cp:
        raise UserError(
            f"cannot split a pack of {num_tokens} tokens among {sp * cp} ranks (ulysses {sp} x cp {cp}); "
            f"expected at least {sp * cp} tokens"
        )
    by_cp_rank = [
        np.concatenate([np.arange(*chunk, dtype=np.int64) for chunk in _chunks(num_tokens, cp, cp_rank)])
        for cp_rank in range(cp)
    ]
    return SequenceSplit(
        num_tokens, sp, cp, tuple(part for tokens in by_cp_rank for part in np.array_split(tokens, sp))
    )


def _chunks(num_tokens: int, cp: int, cp_rank: int) -> tuple[tuple[int, int], ...]:
    if cp == 1:
        return ((0, num_tokens),)
    size, larger = divmod(num_tokens, 2 * cp)
    starts = [index * size + min(index, larger) for index in range(2 * cp + 1)]
    return tuple((starts[index], starts[index + 1]) for index in (cp_rank, 2 * cp - 1 - cp_rank))
