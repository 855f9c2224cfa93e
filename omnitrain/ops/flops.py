"""Count the floating-point operations of a model from the products that it computes, on tensors without content.

A product of ``[m, k]`` and ``[k, n]`` is ``2 m k n`` FLOPs: a multiplication and an addition for each of its terms.
Matrix products, convolutions, grouped products of experts and attention count; sums, norms and activations do not.

Attention over a sample of ``l`` tokens computes a score, and reads a value, for pairs of a query and a key. ``full``
counts all ``l * l`` pairs, ``kept`` only those that the mask keeps: ``l (l + 1) / 2`` if it is causal. For each pair
and query head, the forward takes ``2 D + 2 E`` FLOPs with heads of width ``D`` and values of width ``E``, and the
backward twice as many. That flash attention computes scores again in its backward is not counted.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from omnitrain.ops.attention import Attend, Call, MaskSpec, attending_through
from omnitrain.ops.attention.spec import FULL, GENERAL
from omnitrain.torch_private import GROUPED_MM, FakeTensor, FakeTensorMode, TorchDispatchMode, packet_of

M = TypeVar("M", bound=nn.Module)

_ATEN = torch.ops.aten
# Torch counts neither these forms of its products, nor grouped products.
_FORMS = {_ATEN.addmm_: _ATEN.addmm, _ATEN.baddbmm_: _ATEN.baddbmm}


@dataclass(frozen=True)
class Flops:
    """Numbers of floating-point operations.

    Attributes:
        products: of matrices, convolutions and experts.
        kept: of attention, for the pairs that masks keep.
        full: of attention, for all pairs of a sample.
    """

    products: int = 0
    kept: int = 0
    full: int = 0

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
    """The FLOPs of a forward, of its backward, and of what the backward computes again to save memory."""

    forward: Flops = Flops()
    backward: Flops = Flops()
    again: Flops = Flops()

    @property
    def model(self) -> Flops:
        """What the model needs, whatever the backward computes again."""
        return self.forward + self.backward

    @property
    def hardware(self) -> Flops:
        """What the device computes."""
        return self.model + self.again

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward, self.again + other.again)

    def __mul__(self, times: int) -> Passes:
        return Passes(self.forward * times, self.backward * times, self.again * times)


@dataclass(frozen=True)
class Attention:
    """The attention of one call of a layer.

    Attributes:
        forward: FLOPs for a pair of a query and a key, over all heads.
        backward: the same, of the gradients that are needed.
        is_causal: whether a token sees no later token. Masks of other kinds than causal and window count as full.
        window: number of tokens that a token sees, itself included; None: all.
        is_again: whether the backward computes the forward again.
    """

    forward: int
    backward: int
    is_causal: bool
    window: int | None = None
    is_again: bool = False

    def of(self, lengths: Iterable[int]) -> Passes:
        """Return the FLOPs over samples of these lengths in tokens."""
        lengths = tuple(lengths)
        kept, full = sum(map(self.pairs, lengths)), sum(length**2 for length in lengths)
        passes = Passes(Flops(0, self.forward * kept, self.forward * full), self._backward(kept, full))
        return Passes(passes.forward, passes.backward, passes.forward) if self.is_again else passes

    def _backward(self, kept: int, full: int) -> Flops:
        return Flops(0, self.backward * kept, self.backward * full)

    def pairs(self, length: int) -> int:
        """Return the pairs that the mask keeps in a sample of ``length`` tokens."""
        if not self.is_causal:
            return length**2
        seen = length if self.window is None else min(self.window, length)
        return length * seen - seen * (seen - 1) // 2


@dataclass(frozen=True)
class AttentionOfSamples:
    """An :class:`Attention`, and the lengths over which it ran, in tokens."""

    layer: Attention
    lengths: tuple[int, ...]


@dataclass
class Counted:
    """What a :class:`FlopCounter` saw.

    Attributes:
        forward: FLOPs of products in forwards.
        backward: FLOPs of products in backwards.
        again: FLOPs of products that backwards compute again.
        attention: the calls of attention.
    """

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


@dataclass(frozen=True)
class Recomputed:
    """Modules whose forward the backward computes again.

    Attributes:
        modules: their names.
        saved_ops: names of ops whose results are kept, such as ``aten.mm``.
    """

    modules: Collection[str]
    saved_ops: Collection[str] = ()

    @property
    def keeps_attention(self) -> bool:
        """Whether the results of attention are kept."""
        return any("attention" in op or "attn" in op for op in self.saved_ops)


class FlopCounter:
    """Counts what runs on the tensors of a model from :func:`without_content`, while :meth:`counting`.

    Attributes:
        counted: what it saw so far.
    """

    def __init__(self) -> None:
        self.counted = Counted()
        self._is_backward = False
        self._again: list[Recomputed] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the operations inside; packed attention and torch's own are not computed."""
        with _Operations(self), _TorchAttention(self), attending_through(self._packed_attention):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count the products inside as those of a backward."""
        self._is_backward = True
        try:
            yield
        finally:
            self._is_backward = False

    @contextmanager
    def computing_again(self, model: nn.Module, recomputed: Iterable[Recomputed]) -> Iterator[None]:
        """Count the forwards of these modules of ``model`` as computed again in the backward, too."""
        with ExitStack() as stack:
            for those in recomputed:
                for name in those.modules:
                    module = model.get_submodule(name)
                    before = module.register_forward_pre_hook(lambda *_, those=those: self._again.append(those))
                    after = module.register_forward_hook(lambda *_: self._left())
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            yield

    def _left(self) -> None:
        self._again.pop()

    def add_products(self, op: Any, flops: int) -> None:
        """Add the FLOPs of a product.

        Args:
            op: torch's op.
            flops: its FLOPs.
        """
        if self._is_backward:
            self.counted.backward += flops
            return
        self.counted.forward += flops
        if self._again and str(op) not in self._again[-1].saved_ops:
            self.counted.again += flops

    def _packed_attention(self, call: Call, _: Attend) -> Tensor:
        lengths = [stop - start for start, stop in pairwise(call.mask.offsets)]
        is_causal, window = _pattern_of(call.mask, call.query.device)
        return self.attend(call.query, call.key, call.value, lengths, is_causal, window).transpose(1, 2)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Sequence[int],
        is_causal: bool,
        window: int | None = None,
    ) -> Tensor:
        """Count attention, and return a result without content, ``[..., H, T, E]``, with a graph.

        Args:
            query: ``[..., H, T, D]``.
            key: ``[..., K, S, D]``.
            value: ``[..., K, S, E]``.
            lengths: of the samples.
            is_causal: see :class:`Attention`.
            window: see :class:`Attention`.
        """
        heads, of_key, of_value = query.size(-3), 2 * query.size(-1), 2 * value.size(-1)
        has_graph = torch.is_grad_enabled()
        needs_q, needs_k, needs_v = (has_graph and x.requires_grad for x in (query, key, value))
        backward = of_value * (needs_q or needs_k) + of_key * needs_q + of_key * needs_k + of_value * needs_v
        is_again = bool(self._again) and not self._again[-1].keeps_attention
        layer = Attention(heads * (of_key + of_value), heads * backward, is_causal, window, is_again)
        self.counted.attention.append(AttentionOfSamples(layer, tuple(lengths)))
        out: Tensor = _WithoutContent.apply(query, key, value)
        return out


class _WithoutContent(torch.autograd.Function):
    """A result of attention's shape, and gradients of the shapes of its inputs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return query.new_empty(*query.shape[:-1], value.size(-1), dtype=value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


class _Operations(TorchDispatchMode):
    """Counts a product if an operand of it has no content. The others are constants, such as rotary angles."""

    def __init__(self, counter: FlopCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, op = kwargs or {}, packet_of(func)
        if op is GROUPED_MM:  # torch's shapes of it are for bf16 on CUDA alone
            self._counter.add_products(op, grouped_product_flops(args[0].shape, args[1].shape))
            return args[0].new_empty(grouped_shape(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs")))
        out = func(*args, **kwargs)
        formula = flop_registry.get(_FORMS.get(op, op))
        if formula is not None and any(isinstance(value, FakeTensor) for value in args):
            self._counter.add_products(op, int(formula(*args, **kwargs, out_val=out)))
        return out


class _TorchAttention(TorchFunctionMode):
    """Counts torch's ``scaled_dot_product_attention``, whatever kernel would compute it."""

    def __init__(self, counter: FlopCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

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
        queries, keys, batch = query.size(-2), key.size(-2), prod(query.shape[:-3])
        if queries != keys:  # over other states: all pairs count
            return self._cross(query, key, value)
        if attn_mask is None:
            return self._counter.attend(query, key, value, [queries] * batch, is_causal)
        return self._counter.attend(query, key, value, [queries] * batch, *_pattern(attn_mask))

    def _cross(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.repeat_interleave(query.size(-3) // key.size(-3), -3).mT
        return scores @ value.repeat_interleave(query.size(-3) // value.size(-3), -3)


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


def grouped_product_flops(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the FLOPs of ``torch._grouped_mm``.

    Args:
        left: ``[S, in]``, rows sorted by expert, or ``[M, S]``.
        right: ``[E, in, out]``, or ``[S, N]`` for the gradients of the experts' matrices.
    """
    return 2 * prod(left) * right[-1]


def grouped_shape(left: Tensor, right: Tensor, offsets: Tensor | None) -> list[int]:
    """Return the shape of the result of ``torch._grouped_mm``."""
    if right.ndim == 3:
        return [*left.shape[:-1], right.size(-1)]
    assert offsets is not None
    return [offsets.size(0), left.size(0), right.size(1)]


def without_content(model: M) -> M:
    """Copy a model with parameters that have a shape but no content, and take no memory.

    Its buffers, and integers that a forward computes from its inputs, have content, so that a forward may read them;
    buffers on ``meta`` become zeros.

    Args:
        model: on any device, not sharded.
    """
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


def count(run: Callable[[], Sequence[Tensor]], model: nn.Module, recomputed: Iterable[Recomputed] = ()) -> Counted:
    """Count a forward, and the backward from those of its results that have a graph.

    Args:
        run: runs the forward of ``model``.
        model: from :func:`without_content`.
        recomputed: what its backward computes again.
    """
    counter = FlopCounter()
    with counter.counting():
        with counter.computing_again(model, recomputed):
            ends = [out for out in run() if out.requires_grad]
        with counter.backward():
            if ends:
                torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
    model.zero_grad(set_to_none=True)
    return counter.counted


def by_layer(attention: Iterable[AttentionOfSamples]) -> dict[Attention, int]:
    """Return attention -> number of calls."""
    found: defaultdict[Attention, int] = defaultdict(int)
    for call in attention:
        found[call.layer] += 1
    return dict(found)
