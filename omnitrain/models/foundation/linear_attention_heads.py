"""Linear attention when ranks share a sequence: each rank runs the kernels over all tokens, for some of the heads.

Only two kernels of such a layer mix tokens: a short convolution, channel by channel, and the delta rule, head by head.
We recognize them by their arguments. A layer gets a copy of its forward in which their names refer to functions that
exchange tokens for heads around the kernel. The rest of the layer works on this rank's tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from omnitrain.ops.attention.packed_context import PackedSequence, packed_sequence

Kernel = Callable[..., Any]

_CONVOLUTION = ("hidden_states", "weight", "bias", "activation")
_DELTA_RULE = ("query", "key", "value", "g", "beta")
_PACKING = {"cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


@cache
def by_heads(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a layer class's forward for a slice of the sequence; None: it does not use both kernels."""
    plain = inspect.unwrap(forward)
    if not isinstance(plain, FunctionType):
        return None
    wrappers = {name: _wrapper_of(plain.__globals__.get(name)) for name in plain.__code__.co_names}
    # Look a kernel up at each call: another implementation may replace it.
    kernels = {
        name: partial(wrapper, lambda *args, name=name, **kwargs: plain.__globals__[name](*args, **kwargs))
        for name, wrapper in wrappers.items()
        if wrapper
    }
    if set(wrappers.values()) - {None} != {_convolved, _delta_rule}:
        return None
    changed = FunctionType(
        plain.__code__, plain.__globals__ | kernels, plain.__name__, plain.__defaults__, plain.__closure__
    )
    changed.__kwdefaults__ = plain.__kwdefaults__
    return changed


def _wrapper_of(function: Any) -> Callable[..., Any] | None:
    """The function that runs a kernel by heads; None: ``function`` is no such kernel."""
    if not inspect.isfunction(function):
        return None
    arguments = tuple(inspect.signature(function).parameters)
    if arguments[:4] == _CONVOLUTION:
        return _convolved
    return _delta_rule if arguments[:5] == _DELTA_RULE and "chunk_size" in arguments else None


def _convolved(
    kernel: Kernel, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **_: Any
) -> Tensor:
    """Run ``kernel`` for this rank's tokens ``[1, C, t]``; ``weight`` ``[C, width]``."""

    def compute(states: Sequence[Tensor], heads: slice) -> Tensor:
        bias_of_heads = None if bias is None else bias[heads]
        outputs = [
            kernel(sample[..., 0].T[None], weight[heads], bias_of_heads, activation)[0].T
            for sample in _samples(states[0])
        ]
        return torch.cat(outputs)[..., None]

    return _run(compute, [hidden_states[0].T[..., None]], weight.size(0))[..., 0].T[None]


def _delta_rule(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **arguments: Any
) -> tuple[Tensor, None]:
    """Run ``kernel`` for this rank's tokens ``[1, t, heads, ...]``; a query head may serve several value heads."""
    arguments = {name: argument for name, argument in arguments.items() if name not in _PACKING}
    tensors = [tensor[0] for tensor in (query, key, value, g, beta)]
    num_heads = value.size(2)
    tensors[:2] = [tensor.repeat_interleave(num_heads // tensor.size(1), dim=1) for tensor in tensors[:2]]

    def compute(states: Sequence[Tensor], heads: slice) -> Tensor:
        whole = [state.unflatten(2, tensor.shape[2:] or (1,)) for state, tensor in zip(states, tensors, strict=True)]
        whole = [state if tensor.ndim > 2 else state[..., 0] for state, tensor in zip(whole, tensors, strict=True)]
        samples = zip(*map(_samples, whole), strict=True)
        return torch.cat([kernel(*(tensor[None] for tensor in sample), **arguments)[0][0] for sample in samples])

    rows = _run(compute, [tensor.flatten(2) if tensor.ndim > 2 else tensor[..., None] for tensor in tensors], num_heads)
    return rows[None], None


def _run(compute: Callable[[Sequence[Tensor], slice], Tensor], tensors: Sequence[Tensor], num_heads: int) -> Tensor:
    """Run ``compute`` over the whole sequence for this rank's heads; for all heads if their number is not divisible."""
    sequence_slice = _sequence().sequence_slice
    assert sequence_slice is not None
    if num_heads % sequence_slice.num_ranks == 0:
        return sequence_slice.by_heads(compute, tensors)
    whole = compute([sequence_slice.gather(tensor, 0) for tensor in tensors], slice(0, num_heads))
    return whole.index_select(0, sequence_slice.positions)


def _samples(whole: Tensor) -> list[Tensor]:
    """Split ``[T, ...]`` into samples."""
    return [whole[start:stop] for start, stop in pairwise(_sequence().offsets)]


def _sequence() -> PackedSequence:
    sequence = packed_sequence()
    assert sequence is not None
    return sequence
