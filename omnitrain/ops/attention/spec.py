"""One attention over a packed row: its mask, its other arguments, and what a backend of it declares.

Shapes: ``H`` heads, ``K`` key heads (``H`` is a multiple), ``T`` tokens of the row, ``D`` head dimension, ``E`` width
of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from omnitrain.errors import UserError
from omnitrain.ops.cpu.unread_rows import ReadRows
from omnitrain.ops.device import to_device

# What a call can need of a backend: the kind of its mask, and these.
FULL, CAUSAL, WINDOW, GENERAL = "full", "causal", "window", "general"
GQA = "grouped heads"
VALUE_WIDTH = "values of another width"
DROPOUT = "dropout"
SINKS = "sinks"
SOFTCAP = "softcap"
POSITION_BIAS = "position_bias"
EVERYTHING = frozenset({FULL, CAUSAL, WINDOW, GENERAL, GQA, VALUE_WIDTH, DROPOUT, SINKS, SOFTCAP, POSITION_BIAS})

_NO_TENSOR = "the mask of a packed row is a description, no tensor"

# (batch index, head index, query index, key index) -> may the query see the key; indices broadcast.
MaskFunction = Callable[..., torch.Tensor]

Made = TypeVar("Made")


class MaskUseError(UserError, AttributeError, TypeError):
    """A model computes on the attention mask of a packed row instead of handing it on."""


class MaskSpec:
    """The mask of one packed row: nothing crosses a border, and within a segment ``kind`` says who sees whom.

    It travels through a model in place of the mask tensor and is handed to attention unchanged, through activation
    recompute and FSDP too. So it is neither a tensor nor a dataclass (FSDP rebuilds those), and two specs are equal
    only if they are one object.

    Attributes:
        borders: ``(0, ..., T)``, strictly rising.
        causal: a token sees none that come after it.
        window: a token sees only so many, itself included; None: all of the segment.
        general: in place of ``causal`` and ``window``: a function of row indices that is exact within each segment, or
            a mask ``[1, 1 or heads, T, T]`` (boolean: may see, or a float to add to the scores).
        use_vmap: whether ``general`` wants scalar indices, as transformers says of functions that models add.
        shard: the part of the row that is on this rank; None: all of it. All else describes the whole row.
        ndim: as of the tensor that it stands for.
        shape: as of the tensor that it stands for.
    """

    ndim = 4

    def __init__(
        self,
        borders: Sequence[int],
        *,
        causal: bool = False,
        window: int | None = None,
        general: MaskFunction | torch.Tensor | None = None,
        use_vmap: bool = False,
    ) -> None:
        self.borders = tuple(dict.fromkeys(borders))
        self.causal = causal
        self.window = window if window is not None and window < self.max_length else None
        self.general = general
        self.use_vmap = use_vmap
        self.shard: SequenceShard | None = None
        self._whole: MaskSpec | None = None
        self.shape = (1, 1, self.borders[-1], self.borders[-1])
        self._made: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        raise MaskUseError(f"this model asks its attention mask for {name!r}, so it cannot be packed: {_NO_TENSOR}")

    def __getitem__(self, index: Any) -> Any:
        raise MaskUseError(f"this model cuts its attention mask, so it cannot be packed: {_NO_TENSOR}")

    def __repr__(self) -> str:
        window = f" of {self.window}" if self.window else ""
        return f"MaskSpec({self.kind}{window}, {len(self.borders) - 1} segments, {self.borders[-1]} tokens)"

    @property
    def kind(self) -> str:
        """``full``, ``causal``, ``window`` (causal, too) or ``general``."""
        if self.general is not None:
            return "general"
        if self.window is not None:
            return "window"
        return "causal" if self.causal else "full"

    @property
    def max_length(self) -> int:
        """Tokens of the longest segment."""
        return max((stop - start for start, stop in pairwise(self.borders)), default=0)

    def remember(self, key: Any, make: Callable[[], Made]) -> Made:
        """What ``make()`` returned when it was first asked for under ``key``: layers share what follows from a spec."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def on(self, shard: SequenceShard) -> MaskSpec:
        """The same mask, for a rank that has only ``shard`` of the row."""
        return self._with(self.general, shard)

    @property
    def whole(self) -> MaskSpec:
        """The same mask, for a rank that has the whole row."""
        return self if self._whole is None else self._whole

    def of_heads(self, start: int, stop: int) -> MaskSpec:
        """The mask of the heads ``start`` to ``stop`` alone, for a rank that has the whole row of them."""
        if not isinstance(self.general, torch.Tensor) or self.general.size(1) == 1:
            return self.whole
        general = self.general[:, start:stop]
        return self.whole.remember((start, stop), lambda: self._with(general, None))

    def _with(self, general: MaskFunction | torch.Tensor | None, shard: SequenceShard | None) -> MaskSpec:
        spec = MaskSpec(self.borders, causal=self.causal, window=self.window, general=general, use_vmap=self.use_vmap)
        if shard is not None:
            spec.shard, spec._whole = shard, self
        return spec

    def block_mask(self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> torch.Tensor:
        """The mask between two runs ``(start, stop)`` of one segment, ``[1, 1 or heads, queries, keys]``.

        Boolean, or a float to add to the scores.
        """
        if isinstance(self.general, torch.Tensor):
            return self.general[..., slice(*queries), slice(*keys)]
        return sdpa_mask(
            batch_size=1,
            q_length=queries[1] - queries[0],
            kv_length=keys[1] - keys[0],
            q_offset=queries[0],
            kv_offset=keys[0],
            mask_function=self.function(device),
            allow_is_causal_skip=False,
            use_vmap=self.use_vmap,
            device=device,
        )

    def between(self, start: int, stop: int) -> MaskSpec:
        """The spec of a part of the row, which no segment reaches into, as a row of its own."""
        general = self.general
        if isinstance(general, torch.Tensor):
            general = general[..., start:stop, start:stop]
        elif general is not None:
            general = partial(_moved, general, start)
        borders = [border - start for border in self.borders if start <= border <= stop]
        return MaskSpec(borders, causal=self.causal, window=self.window, general=general, use_vmap=self.use_vmap)

    def function(self, device: torch.device) -> MaskFunction:
        """The mask as a function of row indices that is exact within each segment (it may open others).

        Raises:
            TypeError: the mask is a float tensor, which no such function can say.
        """
        if callable(self.general):
            return self.general
        if isinstance(self.general, torch.Tensor):
            if self.general.dtype != torch.bool:
                raise TypeError("a mask of floats is not a function of indices")
            return partial(_look_up, self.general.to(device))
        if self.window is not None:
            return sliding_window_causal_mask_function(self.window)
        return causal_mask_function if self.causal else bidirectional_mask_function

    def row_function(self, device: torch.device) -> MaskFunction:
        """The mask as a function of row indices, exact for the whole row."""
        segments = segment_numbers(self.borders, device)
        return and_masks(partial(_same, segments), self.function(device))


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one attention.

    Attributes:
        query: ``[1, H, T, D]``.
        key: ``[1, K, T, D]``.
        value: ``[1, K, T, E]``.
        mask: who sees whom.
        scale: factor on the scores; None: ``D ** -0.5``.
        dropout: probability of dropping an attention weight.
        softcap: scaled scores become ``softcap * tanh(score / softcap)``.
        position_bias: ``[1, 1 or H, T, T]``, added to scaled and capped scores.
        sinks: ``[H]``, the logit of one more key per head, whose value is zero.
        read: the only tokens whose output is used; a backend need not compute that of the others. None: all.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: MaskSpec
    scale: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    position_bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    read: ReadRows | None = None

    @property
    def scaling(self) -> float:
        """The factor on the scores."""
        return self.query.size(-1) ** -0.5 if self.scale is None else self.scale

    @property
    def has_gradients(self) -> bool:
        """Whether a backward may follow."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.query, self.key, self.value))

    @property
    def needs(self) -> frozenset[str]:
        """What a backend must honour."""
        extra = {
            GQA: self.query.size(1) != self.key.size(1),
            VALUE_WIDTH: self.query.size(-1) != self.value.size(-1),
            DROPOUT: self.dropout > 0,
            SINKS: self.sinks is not None,
            SOFTCAP: self.softcap is not None,
            POSITION_BIAS: self.position_bias is not None,
        }
        return frozenset({self.mask.kind, *(name for name, needed in extra.items() if needed)})


@dataclass(frozen=True)
class Backend:
    """One way to compute a :class:`Call`; outputs and gradients are exact for all that it honours.

    Attributes:
        name: by which users choose it.
        honours: of what a call can need.
        obstacle: why it cannot run a call here (device, dtype, package); None: it can.
        attend: the call -> ``[1, T, H, E]``, in the dtype of the values.
        automatic_on: device types where ``auto`` may choose it; None: all.
    """

    name: str
    honours: frozenset[str]
    obstacle: Callable[[Call], str | None]
    attend: Callable[[Call], torch.Tensor]
    automatic_on: frozenset[str] | None = None


def repeat_heads(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Each key head once per query head that reads it, along dim 1."""
    return states if states.size(1) == num_heads else states.repeat_interleave(num_heads // states.size(1), dim=1)


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


@lru_cache(maxsize=2)
def plain_spec(borders: tuple[int, ...], causal: bool, window: int | None) -> MaskSpec:
    """The one spec of these values, so that layers which each ask for it share what follows from it.

    Layers of a model alternate between two at most. Those of rows that are done with would only hold memory.
    """
    return MaskSpec(borders, causal=causal, window=window)


def segment_numbers(borders: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """``[T]``: the number of the segment of each token."""
    lengths = torch.tensor([stop - start for start, stop in pairwise(borders)])
    return to_device(torch.arange(len(lengths)).repeat_interleave(lengths), device)


def segment_starts(borders: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """``[T]``: the first token of the segment of each token."""
    return to_device(torch.tensor(borders[:-1]), device)[segment_numbers(borders, device)]


def _same(numbers: torch.Tensor, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
    return numbers[query] == numbers[key]


def _moved(function: MaskFunction, start: int, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
    return function(batch, head, query + start, key + start)


def _look_up(mask: torch.Tensor, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
    return mask[0, head if mask.size(1) > 1 else 0, query, key]
