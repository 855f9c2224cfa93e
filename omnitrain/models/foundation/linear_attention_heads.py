"""Linear attention over a row that several ranks share: each runs its kernels over the whole row, of some of the heads.

All that mixes tokens in such a layer are two kernels, which transformers' files look up by name: a short convolution,
channel by channel, and the delta rule, head by head. They are known by their arguments. A layer gets a copy of its
forward that finds, under these names, functions which exchange rows for heads around them; the rest of it works row by
row, on this rank's rows.
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

from omnitrain.ops.attention import PackedRow, packed_row

Kernel = Callable[..., Any]

_CONVOLUTION = ("hidden_states", "weight", "bias", "activation")
_DELTA_RULE = ("query", "key", "value", "g", "beta")
_PACKING = {"cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


@cache
def by_heads(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """The forward of a layer, for a part of a row; None: it does not name a convolution and a delta rule.

    Args:
        forward: of the layer's class.
    """
    plain = inspect.unwrap(forward)
    if not isinstance(plain, FunctionType):
        return None
    ways = {name: _way_of(plain.__globals__.get(name)) for name in plain.__code__.co_names}
    # Looked up when it is called: another implementation may have been put in its place.
    found = {name: partial(way, partial(_named, plain.__globals__, name)) for name, way in ways.items() if way}
    if set(ways.values()) - {None} != {_convolved, _delta_rule}:
        return None
    changed = FunctionType(
        plain.__code__, plain.__globals__ | found, plain.__name__, plain.__defaults__, plain.__closure__
    )
    changed.__kwdefaults__ = plain.__kwdefaults__
    return changed


def _way_of(function: Any) -> Callable[..., Any] | None:
    """How a function is run by heads; None: it is neither kernel."""
    if not inspect.isfunction(function):
        return None
    arguments = tuple(inspect.signature(function).parameters)
    if arguments[:4] == _CONVOLUTION:
        return _convolved
    return _delta_rule if arguments[:5] == _DELTA_RULE and "chunk_size" in arguments else None


def _named(names: dict[str, Any], name: str, *args: Any, **kwargs: Any) -> Any:
    return names[name](*args, **kwargs)


def _convolved(
    kernel: Kernel, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **_: Any
) -> Tensor:
    """``kernel`` on ``[1, C, t]`` of this rank's tokens; ``weight`` ``[C, width]``."""

    def compute(states: Sequence[Tensor], heads: slice) -> Tensor:
        own_bias = None if bias is None else bias[heads]
        rows = [kernel(part[..., 0].T[None], weight[heads], own_bias, activation)[0].T for part in _samples(states[0])]
        return torch.cat(rows)[..., None]

    return _run(compute, [hidden_states[0].T[..., None]], weight.size(0))[..., 0].T[None]


def _delta_rule(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **arguments: Any
) -> tuple[Tensor, None]:
    """``kernel`` on ``[1, t, heads, ...]`` of this rank's tokens; a query's head may serve several of the values."""
    given = {name: argument for name, argument in arguments.items() if name not in _PACKING}
    tensors = [tensor[0] for tensor in (query, key, value, g, beta)]
    num_heads = value.size(2)
    tensors[:2] = [tensor.repeat_interleave(num_heads // tensor.size(1), dim=1) for tensor in tensors[:2]]

    def compute(states: Sequence[Tensor], heads: slice) -> Tensor:
        whole = [state.unflatten(2, tensor.shape[2:] or (1,)) for state, tensor in zip(states, tensors, strict=True)]
        whole = [state if tensor.ndim > 2 else state[..., 0] for state, tensor in zip(whole, tensors, strict=True)]
        samples = zip(*map(_samples, whole), strict=True)
        return torch.cat([kernel(*(part[None] for part in sample), **given)[0][0] for sample in samples])

    rows = _run(compute, [tensor.flatten(2) if tensor.ndim > 2 else tensor[..., None] for tensor in tensors], num_heads)
    return rows[None], None


def _run(compute: Callable[[Sequence[Tensor], slice], Tensor], tensors: Sequence[Tensor], num_heads: int) -> Tensor:
    """``compute`` of this rank's heads over the whole row; of all heads where the ranks do not divide them."""
    part = _row().part
    assert part is not None
    if num_heads % part.num_ranks == 0:
        return part.by_heads(compute, tensors)
    whole = compute([part.gather(tensor, 0) for tensor in tensors], slice(0, num_heads))
    return whole.index_select(0, part.rows)


def _samples(whole: Tensor) -> list[Tensor]:
    """``[T, ...]``, sample by sample."""
    return [whole[start:stop] for start, stop in pairwise(_row().borders)]


def _row() -> PackedRow:
    row = packed_row()
    assert row is not None
    return row
