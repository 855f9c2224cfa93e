"""A row that was run as a whole, and parts of it that are run by what was kept: what crosses from token to token.

The whole row's attentions and layers with a state are computed, and what they took and gave is kept. Those of a part
give its tokens of what was kept; what the part hands to them must be what the whole handed to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from omnitrain.models.contract.harness import relative
from omnitrain.ops.attention.spec import Call


class Recorded:
    """All of a row, as a :class:`~omnitrain.ops.attention.RowPart`, and what crossed from token to token in it.

    Attributes:
        heads: numbers of query heads of the attentions.
        attended: calls and outputs of all attentions, in order.
        gathered: all that was gathered, in order.
    """

    num_ranks = 1

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.num_rows, self.attention = num_tokens, num_tokens, self
        self.rows = self.host_rows = torch.arange(num_tokens)
        self.heads: set[int] = set()
        self.attended: list[tuple[Call, Tensor]] = []
        self.gathered: list[Tensor] = []

    def attend(self, call: Call, compute: Callable[[Call], Tensor]) -> Tensor:
        """Compute, and keep."""
        self.heads.add(call.query.size(1))
        self.attended.append((call, compute(call)))
        return self.attended[-1][1]

    def by_heads(self, compute: Callable[[Sequence[Tensor], slice], Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Compute, and keep."""
        output = compute(tensors, slice(0, tensors[0].size(1)))
        self.gathered += [*tensors, output]
        return output

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Keep."""
        self.gathered.append(tensor)
        return tensor


class Replayed:
    """Some tokens of a recorded row, as a :class:`~omnitrain.ops.attention.RowPart`.

    Attributes:
        errors: of what the part handed over, relative.
    """

    num_ranks = 1

    def __init__(self, whole: Recorded, rows: Tensor) -> None:
        self.rows = self.host_rows = rows
        self.num_tokens, self.num_rows, self.attention = whole.num_tokens, len(rows), self
        self._attended, self._gathered = iter(whole.attended), iter(whole.gathered)
        self.errors = [0.0]

    def attend(self, call: Call, compute: Callable[[Call], Tensor]) -> Tensor:
        """What was kept, of these tokens."""
        expected, output = next(self._attended)
        for name in ("query", "key", "value"):
            self.errors.append(relative(getattr(call, name), getattr(expected, name)[:, :, self.rows]))
        return output[:, self.rows]

    def by_heads(self, compute: Callable[[Sequence[Tensor], slice], Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """What was kept, of these tokens."""
        for tensor in tensors:
            self.gather(tensor, 0)
        return next(self._gathered)[self.rows]

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """What was kept, of all tokens."""
        whole = next(self._gathered)
        self.errors.append(relative(tensor, whole.index_select(dim, self.rows)))
        return whole


def worst(errors: Iterable[float]) -> float:
    """The largest; NaN, where one is."""
    return float(torch.tensor(list(errors)).max())
