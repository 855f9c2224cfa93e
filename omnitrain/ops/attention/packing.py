"""Says that a forward runs over a packed row, and where its samples begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token
from itertools import pairwise

Borders = tuple[int, ...]

_borders: ContextVar[Borders | None] = ContextVar("packed_borders", default=None)


def packed(cu_seqlens: Sequence[int] | None) -> _Packed:
    """Keep the samples of a row apart in every attention over its ``[1, T]`` tokens: a context for ``with``.

    It goes around the forward of the model that reads the row. Other models, such as towers, run outside of it or
    inside ``packed(None)``: one that happened to see ``T`` tokens would be cut at the row's borders. What it returns
    may be entered any number of times. Activation recompute needs it again only for models that make no mask by
    transformers' interface; attention refuses where it is missing.

    Args:
        cu_seqlens: ``(0, ..., T)``, where the samples begin and the last one ends; None: no packed row.

    Raises:
        ValueError: the borders do not begin at 0, or fall.
    """
    if cu_seqlens is None:
        return _Packed(None)
    borders = tuple(cu_seqlens)
    if borders[:1] != (0,) or any(stop < start for start, stop in pairwise(borders)):
        raise ValueError(f"borders of samples begin at 0 and do not fall, but these are {borders}")
    return _Packed(borders)


def packed_borders() -> Borders | None:
    """The borders of the packed row that is being read; None: there is none."""
    return _borders.get()


class _Packed:
    def __init__(self, borders: Borders | None) -> None:
        self._borders = borders
        self._tokens: list[Token[Borders | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_borders.set(self._borders))

    def __exit__(self, *_: object) -> None:
        _borders.reset(self._tokens.pop())
