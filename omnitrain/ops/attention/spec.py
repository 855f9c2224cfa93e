"""One attention over a packed sequence: its mask, its arguments, and the description of a backend.

Shapes: ``H`` heads, ``K`` key heads (``H`` is a multiple), ``T`` tokens of the sequence, ``D`` head dimension, ``E``
width of a value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils

from omnitrain.errors import UserError
from omnitrain.ops.cpu.unread_rows import ReadRows
from omnitrain.ops.host_values import to_device

# Features that a call can need from a backend; the first four are kinds of masks.
FULL, CAUSAL, WINDOW, GENERAL = "full", "causal", "window", "general"
GQA = "grouped heads"
VALUE_WIDTH = "values of another width"
DROPOUT = "dropout"
SINKS = "sinks"
SOFTCAP = "softcap"
POSITION_BIAS = "position_bias"
EVERYTHING = frozenset({FULL, CAUSAL, WINDOW, GENERAL, GQA, VALUE_WIDTH, DROPOUT, SINKS, SOFTCAP, POSITION_BIAS})

_NO_TENSOR = "the mask of a packed sequence is a description, not a tensor"

# (batch index, head index, query index, key index) -> may the query see the key; indices broadcast.
MaskFunction = Callable[..., Tensor]

Made = TypeVar("Made")


class MaskUseError(UserError, AttributeError, TypeError):
    """A model computes with the attention mask of a packed sequence instead of passing it on."""


class MaskSpec:
    """The mask of one packed sequence: no token sees another segment; ``kind`` describes the mask within a segment.

    Models pass it to attention instead of a mask tensor, unchanged, also through activation recomputation and FSDP. It
    is therefore neither a tensor nor a dataclass (FSDP rebuilds dataclasses), and is equal only to itself.
    """

    ndim = 4  # and ``shape``, of the mask tensor that it replaces

    def __init__(
        self,
        offsets: Sequence[int],
        *,
        causal: bool = False,
        window: int | None = None,
        general: MaskFunction | Tensor | None = None,
        use_vmap: bool = False,
    ) -> None:
        self.offsets = tuple(dict.fromkeys(offsets))  # ``(0, ..., T)``, strictly ascending
        self.causal = causal  # a token sees no later token
        # Number of tokens that a token sees, itself included; None: the whole segment
        self.window = window if window is not None and window < self.max_length else None
        # In place of both: a function of token indices that is exact within each segment, or a mask ``[1, 1 or heads,
        # T, T]`` (boolean: may see, or a float to add to the scores)
        self.general = general
        self.use_vmap = use_vmap  # whether it takes scalar indices, as transformers says of functions that models add
        self.shard: SequenceShard | None = None  # the slice on this rank; other fields are about the whole sequence
        self._whole: MaskSpec | None = None
        self.shape = (1, 1, self.offsets[-1], self.offsets[-1])
        self._made: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        raise MaskUseError(f"this model reads {name!r} of its attention mask, so it cannot be packed: {_NO_TENSOR}")

    def __getitem__(self, index: Any) -> Any:
        raise MaskUseError(f"this model slices its attention mask, so it cannot be packed: {_NO_TENSOR}")

    def __repr__(self) -> str:
        window = f" of {self.window}" if self.window else ""
        return f"MaskSpec({self.kind}{window}, {len(self.offsets) - 1} segments, {self.offsets[-1]} tokens)"

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
        """Number of tokens of the longest segment."""
        return max((stop - start for start, stop in pairwise(self.offsets)), default=0)

    def remember(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return the cached result of ``make()`` for ``key``, so that layers share it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def on(self, shard: SequenceShard) -> MaskSpec:
        """Return the same mask for a rank that has only ``shard`` of the sequence."""
        return self._with(self.general, shard)

    @property
    def whole(self) -> MaskSpec:
        """The same mask, for a rank that has the whole sequence."""
        return self if self._whole is None else self._whole

    def of_heads(self, start: int, stop: int) -> MaskSpec:
        """Return the mask of the heads ``start`` to ``stop``, for a rank that has the whole sequence of these heads."""
        if not isinstance(self.general, Tensor) or self.general.size(1) == 1:
            return self.whole
        general = self.general[:, start:stop]
        return self.whole.remember((start, stop), lambda: self._with(general, None))

    def _with(self, general: MaskFunction | Tensor | None, shard: SequenceShard | None) -> MaskSpec:
        spec = MaskSpec(self.offsets, causal=self.causal, window=self.window, general=general, use_vmap=self.use_vmap)
        if shard is not None:
            spec.shard, spec._whole = shard, self
        return spec

    def block_mask(self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Tensor:
        """Return the mask between two runs of one segment, boolean or to add: ``[1, 1 or heads, queries, keys]``."""
        if isinstance(self.general, Tensor):
            return self.general[..., slice(*queries), slice(*keys)]
        return masking_utils.sdpa_mask(
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
        """Return the spec of the tokens ``start`` to ``stop`` as a separate sequence; both must be offsets."""
        general = self.general
        if isinstance(general, Tensor):
            general = general[..., start:stop, start:stop]
        elif general is not None:
            general = partial(_moved, general, start)
        offsets = [offset - start for offset in self.offsets if start <= offset <= stop]
        return MaskSpec(offsets, causal=self.causal, window=self.window, general=general, use_vmap=self.use_vmap)

    def function(self, device: torch.device) -> MaskFunction:
        """Return the mask as a function of token indices, exact within each segment; a float mask is a TypeError."""
        if callable(self.general):
            return self.general
        if isinstance(self.general, Tensor):
            if self.general.dtype != torch.bool:
                raise TypeError("a float mask is not a function of indices")
            return partial(_look_up, self.general.to(device))
        if self.window is not None:
            return masking_utils.sliding_window_causal_mask_function(self.window)
        return masking_utils.causal_mask_function if self.causal else masking_utils.bidirectional_mask_function

    def packed_function(self, device: torch.device) -> MaskFunction:
        """Return the mask as a function of token indices, exact for the whole sequence."""
        segments = segment_numbers(self.offsets, device)
        return masking_utils.and_masks(partial(_same, segments), self.function(device))


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of one attention."""

    query: Tensor  # [1, H, T, D]
    key: Tensor  # [1, K, T, D]
    value: Tensor  # [1, K, T, E]
    mask: MaskSpec  # the mask of the sequence
    scale: float | None = None  # factor on the scores; None: D ** -0.5
    dropout: float = 0.0  # probability of dropping an attention weight
    softcap: float | None = None  # scaled scores become softcap * tanh(score / softcap)
    position_bias: Tensor | None = None  # [1, 1 or H, T, T], added to scaled and capped scores
    sinks: Tensor | None = None  # [H], the logit of an additional key per head with value zero
    # the tokens whose output is used; a backend need not compute the others. None: all tokens
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
        """The features that a backend must support."""
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
class AttentionBackend:
    """One way to compute an :class:`AttentionCall`; exact outputs and gradients for all features that it supports."""

    name: str  # name in the settings
    honours: frozenset[str]  # the features that it supports
    obstacle: Callable[
        [AttentionCall], str | None
    ]  # returns why it cannot run a call (device, dtype, package); None: it can
    attend: Callable[[AttentionCall], Tensor]  # the call -> [1, T, H, E], in the dtype of the values
    automatic_on: frozenset[str] | None = None  # device types on which auto may choose it; None: all


def repeat_heads(states: Tensor, num_heads: int) -> Tensor:
    """Repeat each key head along dim 1, once per query head that reads it."""
    return states if states.size(1) == num_heads else states.repeat_interleave(num_heads // states.size(1), dim=1)


class SequenceShard(Protocol):
    """This rank's slice of a sequence, and the ranks that have the other slices."""

    @property
    def num_local_tokens(self) -> int:
        """Number of tokens of the sequence on this rank."""

    def attend(self, call: AttentionCall, compute: Callable[[AttentionCall], Tensor]) -> Tensor:
        """Attend from this rank's tokens to the whole sequence: ``[1, local tokens, H, E]``. All its ranks call it.

        ``call`` has queries, keys and values ``[1, heads, local tokens, width]`` of this rank; all other fields are for
        the whole sequence and all heads. ``compute`` computes attention ``[1, T, heads, E]`` of a call over a whole
        sequence, for some of the heads.
        """


# cu_seqlens tensor -> the slice of its sequence on this rank.
_shards = WeakTensorKeyDictionary()


def offsets_on(cu_seqlens: Tensor, shard: SequenceShard) -> Tensor:
    """Return a copy of a whole sequence's ``cu_seqlens``, with which layers attend from a slice of it."""
    copy = cu_seqlens.clone()
    _shards[copy] = shard
    return copy


def shard_of(cu_seqlens: Tensor) -> SequenceShard | None:
    """Return the slice that was given to :func:`offsets_on`; None: the whole sequence is on this rank."""
    shard: SequenceShard | None = _shards.get(cu_seqlens)
    return shard


# A spec lives as long as something holds it; layers of a model alternate between at most two specs, so two are held
# here. A packed sequence, or its offsets tensor, holds those of its layers: sequences in flight may alternate, too.
_specs: WeakValueDictionary[tuple[Any, ...], MaskSpec] = WeakValueDictionary()
_latest: deque[MaskSpec] = deque(maxlen=2)


def plain_spec(offsets: tuple[int, ...], causal: bool, window: int | None) -> MaskSpec:
    """Return the same spec object for the same values, so that layers share its cached results."""
    key = (offsets, causal, window)
    spec = _specs.get(key)
    if spec is None:
        spec = _specs[key] = MaskSpec(offsets, causal=causal, window=window)
    if spec not in _latest:
        _latest.append(spec)
    return spec


def forget_specs() -> None:
    """Let go of the specs that no sequence holds: the next one of the same values makes its tables again."""
    _latest.clear()
    _specs.clear()


def segment_numbers(offsets: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``[T]``, the index of the segment of each token."""
    lengths = torch.tensor([stop - start for start, stop in pairwise(offsets)])
    return to_device(torch.arange(len(lengths)).repeat_interleave(lengths), device)


def segment_starts(offsets: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``[T]``, the first token of the segment of each token."""
    return to_device(torch.tensor(offsets[:-1]), device)[segment_numbers(offsets, device)]


def _same(numbers: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
    return numbers[query] == numbers[key]


def _moved(function: MaskFunction, start: int, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
    return function(batch, head, query + start, key + start)


def _look_up(mask: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
    return mask[0, head if mask.size(1) > 1 else 0, query, key]
