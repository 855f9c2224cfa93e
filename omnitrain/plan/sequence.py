"""Which rows of a packed row lie on which rank, where several ranks share a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omnitrain.errors import UserError


@dataclass(frozen=True, eq=False)
class SequenceSplit:
    """One row of tokens, dealt to ``cp x sp`` ranks. Make one with :func:`split_sequence`.

    With cp 2 and sp 2, and a letter per place::

        token   0 1 2 3 4 5 6 7
        place   A A C C D D B B      A, B: cp rank 0 (chunks 0 and 3 of 4); C, D: cp rank 1 (chunks 1 and 2)

    Attributes:
        num_tokens: of the whole row.
        sp: ranks that exchange rows for heads.
        cp: ranks that attend around a ring.
        rows: of place ``cp_rank * sp + sp_rank``: ``[own tokens]`` int64, ascending token numbers.
    """

    num_tokens: int
    sp: int
    cp: int
    rows: tuple[np.ndarray, ...]

    def rows_of_ring(self, cp_rank: int) -> tuple[np.ndarray, ...]:
        """``rows`` of the sp ranks of one cp rank; end to end they ascend."""
        return self.rows[cp_rank * self.sp : (cp_rank + 1) * self.sp]

    def chunks(self, cp_rank: int) -> tuple[tuple[int, int], ...]:
        """``(start, stop)`` of the one or two runs of tokens that are the rows of a cp rank, ascending."""
        return _chunks(self.num_tokens, self.cp, cp_rank)


def split_sequence(num_tokens: int, *, sp: int, cp: int = 1) -> SequenceSplit:
    """Deal a row of ``num_tokens`` to ``cp x sp`` ranks.

    Cp rank c has chunks c and 2 cp - 1 - c of 2 cp nearly equal ones, so that under a causal mask all have about the
    same work. Within its rows, sp ranks have nearly equal runs. No rank is without tokens.

    Args:
        num_tokens: of the row.
        sp: ranks that exchange rows for heads.
        cp: ranks that attend around a ring.

    Raises:
        UserError: fewer tokens than ranks.
    """
    if num_tokens < sp * cp:
        raise UserError(
            f"a row of {num_tokens} tokens cannot be dealt to {sp * cp} ranks (ulysses {sp} x cp {cp}); "
            f"expected {sp * cp} tokens or more"
        )
    of_rings = [
        np.concatenate([np.arange(*chunk, dtype=np.int64) for chunk in _chunks(num_tokens, cp, cp_rank)])
        for cp_rank in range(cp)
    ]
    return SequenceSplit(num_tokens, sp, cp, tuple(part for rows in of_rings for part in np.array_split(rows, sp)))


def _chunks(num_tokens: int, cp: int, cp_rank: int) -> tuple[tuple[int, int], ...]:
    if cp == 1:
        return ((0, num_tokens),)
    size, larger = divmod(num_tokens, 2 * cp)
    starts = [index * size + min(index, larger) for index in range(2 * cp + 1)]
    return tuple((starts[index], starts[index + 1]) for index in (cp_rank, 2 * cp - 1 - cp_rank))
