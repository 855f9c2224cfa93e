"""Says that a forward runs over a packed row, where its samples begin and end, and what of it is on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import torch

from omnitrain.errors import UserError

if TYPE_CHECKING:
    from omnitrain.ops.attention.spec import MaskSpec, SequenceShard

Borders = tuple[int, ...]


class RowPart(Protocol):
    """This rank's tokens of a packed row that several ranks share; the others have the others."""

    @property
    def rows(self) -> torch.Tensor:
        """``[t]`` int64, ascending: which tokens of the row."""
        ...

    @property
    def host_rows(self) -> torch.Tensor:
        """``rows``, on the host."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole row."""
        ...

    @property
    def attention(self) -> SequenceShard:
        """Attends from these tokens to the whole row."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks that share the row."""
        ...

    def by_heads(
        self, compute: Callable[[Sequence[torch.Tensor], slice], torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Compute over the whole row of some of the heads, differentiable; all ranks of the row call it together.

        Args:
            compute: tensors ``[T, own heads, width]``, and which heads these are -> ``[T, own heads, width]``.
            tensors: ``[own tokens, heads, width]``, all with the same number of heads, which ``num_ranks`` divides.

        Returns:
            ``[own tokens, heads, width]``.
        """
        ...

    def gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """What all ranks have of a tensor, in the order of the row, differentiable; all of them call it together.

        Args:
            tensor: with this rank's tokens along ``dim``.
            dim: along which the row runs.
        """
        ...


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The packed row that a forward runs over.

    Attributes:
        borders: ``(0, ..., T)`` of the samples in the whole row.
        part: what of it is on this rank; None: all of it.
        whole_masks: of a part: makes the masks of the whole row, in the order in which the model asks for them.
        masks: that the model has asked for so far, since the row was entered.
    """

    borders: Borders
    part: RowPart | None = None
    whole_masks: Callable[[], Sequence[MaskSpec]] | None = None
    masks: list[MaskSpec] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Tokens that the model sees."""
        return self.borders[-1] if self.part is None else self.part.rows.numel()


_row: ContextVar[PackedRow | None] = ContextVar("packed_row", default=None)


def packed(cu_seqlens: Sequence[int] | None) -> _Inside:
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
        return _Inside(None)
    borders = tuple(cu_seqlens)
    if borders[:1] != (0,) or any(stop < start for start, stop in pairwise(borders)):
        raise ValueError(f"borders of samples begin at 0 and do not fall, but these are {borders}")
    return _Inside(PackedRow(borders))


def inside(row: PackedRow | None) -> _Inside:
    """:func:`packed`, of a row that may lie on several ranks."""
    return _Inside(row)


def packed_row() -> PackedRow | None:
    """The packed row that is being read; None: there is none."""
    return _row.get()


# Modules that learnt from the context alone that the row of their last forward is packed.
_rely_on_context: WeakSet[torch.nn.Module] = WeakSet()


def relies_on_context(module: torch.nn.Module) -> None:
    """``module`` knows from :func:`packed_row` alone that its row is packed, so it needs it in a recomputation, too."""
    _rely_on_context.add(module)


def check_recomputation(module: torch.nn.Module) -> None:
    """Of a module without a packed row: refuse a recomputation that would see the packed row as one sample.

    Raises:
        UserError: its forward was over a packed row.
    """
    if torch._C._current_graph_task_id() == -1:  # not inside a backward
        _rely_on_context.discard(module)
    elif module in _rely_on_context:
        raise UserError(
            f"{type(module).__name__} is recomputed outside of packed(...), by which alone it knew where samples "
            "begin: enter it around the backward, too"
        )


class _Inside:
    def __init__(self, row: PackedRow | None) -> None:
        self._row = row
        self._tokens: list[Token[PackedRow | None]] = []

    def __enter__(self) -> None:
        if self._row is not None and not self._tokens:
            self._row.masks.clear()  # of the forward before
        self._tokens.append(_row.set(self._row))

    def __exit__(self, *_: object) -> None:
        _row.reset(self._tokens.pop())
