"""The context of a forward over a packed sequence: the offsets of its samples, and the slice on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from transformers.masking_utils import or_masks

from omnitrain.errors import UserError
from omnitrain.torch_private import current_graph_task_id

if TYPE_CHECKING:
    from omnitrain.ops.attention.spec import MaskFunction, MaskSpec, SequenceShard


class SequenceSlice(Protocol):
    """This rank's slice of a packed sequence that several ranks share."""

    @property
    def positions(self) -> Tensor:
        """``[t]`` int64, ascending: the tokens of the sequence on this rank."""

    @property
    def host_positions(self) -> Tensor:
        """``positions``, on the host."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole sequence."""

    @property
    def attention(self) -> SequenceShard:
        """The shard that attends from these tokens to the whole sequence."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the sequence."""

    def by_heads(self, compute: Callable[[Sequence[Tensor], slice], Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Compute over the whole sequence for some heads; differentiable. All ranks of the sequence must call it.

        ``compute`` gets tensors ``[T, local heads, width]`` and the slice of these heads, and returns ``[T, local
        heads, width]``. ``tensors`` are ``[local tokens, heads, width]``, all with the same number of heads, a multiple
        of ``num_ranks``. Returns ``[local tokens, heads, width]``.
        """

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Gather this rank's tokens along ``dim`` to all tokens, in order; differentiable; all ranks must call it."""


@dataclass(frozen=True, eq=False)
class PackedSequence:
    """The packed sequence that a forward runs over."""

    offsets: tuple[int, ...]  # (0, ..., T), where each sample starts in the whole sequence, and its end
    sequence_slice: SequenceSlice | None = None  # the slice on this rank; None: the whole sequence
    # with a slice: makes the masks of the whole sequence, in the order in which the model requests them
    whole_masks: Callable[[], Sequence[MaskSpec]] | None = None
    masks: list[MaskSpec] = field(default_factory=list)  # masks that the model requested since the sequence was entered
    specs: set[MaskSpec] = field(default_factory=set)  # the masks of layers that got none from the model

    @property
    def num_local_tokens(self) -> int:
        """Number of tokens that the model gets."""
        return self.offsets[-1] if self.sequence_slice is None else self.sequence_slice.positions.numel()


_running: ContextVar[PackedSequence | None] = ContextVar("packed_sequence", default=None)


def packed(cu_seqlens: Sequence[int] | None) -> _InsideSequence:
    """Return a context in which every attention over the ``[1, T]`` tokens of a sequence keeps its samples apart.

    Use it around the forward of the model that reads the tokens. Run other models, such as towers, outside of it or
    inside ``packed(None)``: an input that happens to have ``T`` tokens would be cut at these offsets. The context can
    be entered any number of times. Activation recomputation needs it again only for models that do not make masks by
    transformers' interface; attention raises if it is missing. ``cu_seqlens`` ``(0, ..., T)`` are the starts of the
    samples and the end of the last one; other offsets are a ValueError.
    """
    if cu_seqlens is None:
        return _InsideSequence(None)
    offsets = tuple(cu_seqlens)
    if offsets[:1] != (0,) or any(stop < start for start, stop in pairwise(offsets)):
        raise ValueError(f"cu_seqlens must start at 0 and ascend; found {offsets}")
    return _InsideSequence(PackedSequence(offsets))


def inside(sequence: PackedSequence | None) -> _InsideSequence:
    """Return the context of :func:`packed` for a sequence that ranks may share."""
    return _InsideSequence(sequence)


def packed_sequence() -> PackedSequence | None:
    """Return the packed sequence of the running forward; None: the input is not packed."""
    return _running.get()


# ``[B, T]`` int64, for each token of the whole sequences the number of its block; 0: none.
_blocks: ContextVar[Tensor | None] = ContextVar("blocks", default=None)


@contextmanager
def seeing_blocks(block_ids: Tensor | None) -> Iterator[None]:
    """Let the tokens of each block see each other, in the masks that models make inside; None: there are no blocks.

    ``block_ids``: ``[B, T]`` int64, for the tokens of the whole sequences: equal ones of a sequence are a block; 0: the
    token belongs to none.
    """
    token = _blocks.set(block_ids)
    try:
        yield
    finally:
        _blocks.reset(token)


def has_blocks() -> bool:
    """Whether some tokens of the running forward see each other."""
    return _blocks.get() is not None


def with_blocks(mask_function: MaskFunction) -> MaskFunction:
    """Return a mask in which tokens also see all tokens of their block."""
    block_ids = _blocks.get()
    return mask_function if block_ids is None else or_masks(mask_function, partial(_of_one_block, block_ids))


def require_no_blocks(module: torch.nn.Module) -> None:
    """Raise a UserError if there are blocks, which a layer without a mask cannot see."""
    if has_blocks():
        raise UserError(
            f"{type(module).__name__} attends without a mask that its model asked for, so tokens of an image cannot "
            "see each other; set `flow.kind: head`"
        )


def _of_one_block(block_ids: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
    own = block_ids[batch, query]
    return (own == block_ids[batch, key]) & (own > 0)


# Modules that knew only from the context that their input was packed. Several forwards may be in flight, packed or not,
# so we do not ask which of them is recomputed: a recomputation must restore the context, also that of unpacked input.
_rely_on_context: WeakSet[torch.nn.Module] = WeakSet()
_MISSING = PackedSequence(())


def relies_on_context(module: torch.nn.Module) -> None:
    """Record that ``module`` knows only by :func:`packed_sequence` that its input is packed; so must recomputation."""
    _rely_on_context.add(module)


def check_recomputation(module: torch.nn.Module) -> None:
    """Raise a UserError if a recomputation outside of :func:`packed` would treat a packed sequence as one sample."""
    in_backward = current_graph_task_id() != -1
    if in_backward and _running.get(_MISSING) is _MISSING and module in _rely_on_context:
        raise UserError(
            f"{type(module).__name__} is recomputed outside of packed(...), so it does not know where samples begin; "
            "give torch.utils.checkpoint a context_fn: omnitrain.ops.recompute.recompute_contexts (with transformers: "
            "gradient_checkpointing_enable({'use_reentrant': False, 'context_fn': recompute_contexts}))"
        )


class _InsideSequence:
    def __init__(self, sequence: PackedSequence | None) -> None:
        self._sequence = sequence
        self._tokens: list[Token[PackedSequence | None]] = []

    def __enter__(self) -> None:
        if self._sequence is not None and not self._tokens:
            self._sequence.masks.clear()  # masks of the previous forward
        self._tokens.append(_running.set(self._sequence))

    def __exit__(self, *_: object) -> None:
        _running.reset(self._tokens.pop())
