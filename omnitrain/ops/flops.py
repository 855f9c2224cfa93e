"""Count the floating-point operations of a model from the products that it computes, on tensors without content.

A product of ``[m, k]`` and ``[k, n]`` is ``2 m k n`` FLOPs. Matrix products, convolutions, grouped products of experts
and attention count; sums, norms and activations do not. Attention over ``l`` tokens has ``full`` = ``l * l`` pairs of a
query and a key, and ``kept`` pairs that the mask keeps, ``l (l + 1) / 2`` if it is causal. For each pair and query
head, the forward takes ``2 D + 2 E`` FLOPs with heads of width ``D`` and values of width ``E``, and the backward twice
as many. That flash attention computes scores again in its backward is not counted.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from omnitrain.ops.attention.entry import Attend, attending_through
from omnitrain.ops.attention.spec import FULL, GENERAL, AttentionCall, MaskSpec
from omnitrain.ops.collectives import with_backward
from omnitrain.torch_private import GROUPED_MM, FakeTensor, FakeTensorMode, TorchDispatchMode, packet_of

M = TypeVar("M", bound=nn.Module)

_ATEN = torch.ops.aten
# Torch counts neither these forms of its products, nor grouped products.
_FORMS = {_ATEN.addmm_: _ATEN.addmm, _ATEN.baddbmm_: _ATEN.baddbmm}


@dataclass(frozen=True)
class Flops:
    """Numbers of floating-point operations."""

    products: int = 0  # of matrices, convolutions and experts
    kept: int = 0  # of attention, for the pairs that masks keep
    full: int = 0  # of attention, for all pairs of a sample

    @property
    def total(self) -> int:
        """All that the masks keep."""
        return self.products + self.kept

    @property
    def total_full(self) -> int:
        """All, as if no mask left anything out."""
        return self.products + self.full

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.products + other.products, self.kept + other.kept, self.full + other.full)

    def __mul__(self, times: int) -> Flops:
        return Flops(self.products * times, self.kept * times, self.full * times)


@dataclass(frozen=True)
class Passes:
    """The FLOPs of a forward, of its backward, and of the forwards that the backward repeats to save memory."""

    forward: Flops = Flops()
    backward: Flops = Flops()
    again: Flops = Flops()

    @property
    def model(self) -> Flops:
        """FLOPs that the model needs, without repeated forwards."""
        return self.forward + self.backward

    @property
    def hardware(self) -> Flops:
        """FLOPs that the device computes, with repeated forwards."""
        return self.model + self.again

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward, self.again + other.again)

    def __mul__(self, times: int) -> Passes:
        return Passes(self.forward * times, self.backward * times, self.again * times)


@dataclass(frozen=True)
class Attention:
    """The attention of one call of a layer."""

    forward: int  # FLOPs for a pair of a query and a key, over all heads
    backward: int  # the same, of the gradients that are needed
    is_causal: bool  # whether a token sees no later token. Masks of other kinds than causal and window count as full
    window: int | None = None  # number of tokens that a token sees, itself included; None: all
    is_again: bool = False  # whether the backward computes the forward again

    def of(self, lengths: Iterable[int]) -> Passes:
        """Return the FLOPs over samples of these lengths in tokens."""
        lengths = tuple(lengths)
        pairs = Flops(0, sum(map(self.pairs, lengths)), sum(length**2 for length in lengths))
        forward = pairs * self.forward
        return Passes(forward, pairs * self.backward, forward if self.is_again else Flops())

    def pairs(self, length: int) -> int:
        """Return the pairs that the mask keeps in a sample of ``length`` tokens."""
        if not self.is_causal:
            return length**2
        seen = length if self.window is None else min(self.window, length)
        return length * seen - seen * (seen - 1) // 2


class AttentionOfSamples(NamedTuple):
    """An :class:`Attention`, and the lengths over which it ran, in tokens."""

    layer: Attention
    lengths: tuple[int, ...]


@dataclass
class Counted:
    """FLOPs of products in forwards, in backwards, and computed again by backwards; and the calls of attention."""

    forward: int = 0
    backward: int = 0
    again: int = 0
    attention: list[AttentionOfSamples] = field(default_factory=list)

    @property
    def products(self) -> Passes:
        """The products alone."""
        return Passes(Flops(self.forward), Flops(self.backward), Flops(self.again))

    @property
    def passes(self) -> Passes:
        """All, with attention over the lengths that it saw."""
        return sum((call.layer.of(call.lengths) for call in self.attention), self.products)

    def with_copies(self, number: int, more: Counted) -> Counted:
        """Return the count of this run, plus ``number`` times the difference of ``more`` to this run."""
        pairs = ((self.forward, more.forward), (self.backward, more.backward), (self.again, more.again))
        calls = (Counter(more.attention) - Counter(self.attention)).elements()
        forward, backward, again = (few + number * (many - few) for few, many in pairs)
        return Counted(forward, backward, again, [*self.attention, *[*calls] * number])


@dataclass(frozen=True)
class Recomputed:
    """Modules, by name, whose forward the backward computes again, without ops that are saved, such as ``aten.mm``."""

    modules: Collection[str]
    saved_ops: Collection[str] = ()


def count(run: Callable[[], Sequence[Tensor]], model: nn.Module, recomputed: Iterable[Recomputed] = ()) -> Counted:
    """Count the forward ``run`` of ``model``, and the backward from its results that have a graph.

    ``model`` is from :func:`without_content`. Packed attention and torch's own are not computed.
    """
    counter = _Counter()
    with counter, _TorchAttention(counter), attending_through(counter.packed_attention):
        with ExitStack() as stack:
            for those in recomputed:
                for module in map(model.get_submodule, those.modules):
                    before = module.register_forward_pre_hook(lambda *_, those=those: counter.again.append(those))
                    after = module.register_forward_hook(lambda *_: counter.left())
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            ends = [out for out in run() if out.requires_grad]
        counter.is_backward = True
        if ends:
            torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
    model.zero_grad(set_to_none=True)
    return counter.counted


class _Counter(TorchDispatchMode):
    """Counts a product if an operand of it has no content. Other products are of constants, such as rotary angles."""

    def __init__(self) -> None:
        super().__init__()
        self.counted, self.is_backward = Counted(), False
        self.again: list[Recomputed] = []  # of the modules that run

    def left(self) -> None:
        self.again.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, op = kwargs or {}, packet_of(func)
        if op is GROUPED_MM:  # torch's shapes of it are for bf16 on CUDA alone
            left, right = args[:2]
            self._add_product(op, 2 * left.numel() * right.size(-1))
            if right.ndim == 3:
                return left.new_empty(*left.shape[:-1], right.size(-1))
            offsets = args[2] if len(args) > 2 else kwargs["offs"]
            return left.new_empty(offsets.size(0), left.size(0), right.size(1))
        out = func(*args, **kwargs)
        formula = flop_registry.get(_FORMS.get(op, op))
        if formula is not None and any(isinstance(value, FakeTensor) for value in args):
            self._add_product(op, int(formula(*args, **kwargs, out_val=out)))
        return out

    def _add_product(self, op: Any, flops: int) -> None:
        if self.is_backward:
            self.counted.backward += flops
            return
        self.counted.forward += flops
        if self.again and str(op) not in self.again[-1].saved_ops:
            self.counted.again += flops

    def packed_attention(self, call: AttentionCall, _: Attend) -> Tensor:
        lengths = [stop - start for start, stop in pairwise(call.mask.offsets)]
        pattern = _pattern_of(call.mask, call.query.device)
        return self.attend(call.query, call.key, call.value, lengths, *pattern).transpose(1, 2)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Sequence[int],
        is_causal: bool,
        window: int | None = None,
    ) -> Tensor:
        """Count attention over samples of these lengths, and return a result ``[..., H, T, E]`` without content."""
        heads, of_key, of_value = query.size(-3), 2 * query.size(-1), 2 * value.size(-1)
        has_graph = torch.is_grad_enabled()
        needs_q, needs_k, needs_v = (has_graph and x.requires_grad for x in (query, key, value))
        backward = of_value * (needs_q or needs_k) + of_key * needs_q + of_key * needs_k + of_value * needs_v
        kept = any("attention" in op or "attn" in op for op in self.again[-1].saved_ops) if self.again else True
        layer = Attention(heads * (of_key + of_value), heads * backward, is_causal, window, is_again=not kept)
        self.counted.attention.append(AttentionOfSamples(layer, tuple(lengths)))
        out: Tensor = with_backward(
            lambda q, _, v: q.new_empty(*q.shape[:-1], v.size(-1), dtype=v.dtype),
            lambda _: tuple(map(torch.empty_like, (query, key, value))),
            *(query, key, value),
        )
        return out


class _TorchAttention(TorchFunctionMode):
    """Counts torch's ``scaled_dot_product_attention``, whatever kernel would compute it."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._attend if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        queries, batch = query.size(-2), prod(query.shape[:-3])
        if queries != key.size(-2):  # over other states: all pairs count
            scores = query @ key.repeat_interleave(query.size(-3) // key.size(-3), -3).mT
            return scores @ value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        pattern = (is_causal, None) if attn_mask is None else _pattern(attn_mask)
        return self._counter.attend(query, key, value, [queries] * batch, *pattern)


def _pattern_of(mask: MaskSpec, device: torch.device) -> tuple[bool, int | None]:
    """Whether a packed mask is causal, and its window."""
    if mask.kind != GENERAL:
        return mask.kind != FULL, mask.window
    longest = max(pairwise(mask.offsets), key=lambda span: span[1] - span[0])
    return _pattern(mask.block_mask(longest, longest, device))


def _pattern(mask: Tensor) -> tuple[bool, int | None]:
    """Whether a mask ``[..., l, l]`` keeps the pairs of a causal one, with or without a window. Else it counts as full.

    A mask that depends on tensors without content, or that is added to scores, counts as full, too.
    """
    if isinstance(mask, FakeTensor) or mask.dtype != torch.bool:
        return False, None
    length, kept = mask.size(-1), mask.sum((-1, -2))
    seen = int(mask[..., -1, :].sum(-1).flatten()[0])  # by the last token
    window = seen if seen < length else None
    is_causal = bool((kept == Attention(0, 0, True, window).pairs(length)).all())
    return is_causal, window if is_causal else None


def without_content(model: M) -> M:
    """Copy an unsharded model with parameters of a shape without content; buffers keep theirs, on ``meta`` zeros."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    shapes: dict[int, Any] = {}
    for parameter in model.parameters():
        with mode:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        shapes[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.is_meta:
            shapes[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
    return copy.deepcopy(model, shapes)


def by_layer(attention: Iterable[AttentionOfSamples]) -> dict[Attention, int]:
    """Return attention -> number of calls."""
    return Counter(call.layer for call in attention)
