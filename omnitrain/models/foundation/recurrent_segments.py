"""Run modules that carry state along the sequence (linear attention, short convolutions) one packed sample at a time.

If ranks share the sequence, each runs the two kernels of linear attention that mix tokens (a convolution by channels,
the delta rule by heads; known by their arguments) over all tokens for some heads, in a copy of the layer's forward.
Other layers run over the whole sequence on each rank, which keeps only its tokens: the gradients of their parameters
are partial sums over the ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from omnitrain.errors import UserError
from omnitrain.ops.attention.packed_context import (
    PackedSequence,
    SequenceSlice,
    check_recomputation,
    packed,
    packed_sequence,
    relies_on_context,
)
from omnitrain.ops.attention.spec import MaskSpec
from omnitrain.ops.patch_forward import Forward, set_forward
from omnitrain.torch_private import tree_map, tree_map_only


def run_by_segment(model: nn.Module, class_names: Sequence[str]) -> None:
    """Make every module of these classes run the samples of a packed sequence one by one; only its forward changes."""
    for module in model.modules():
        if type(module).__name__ in class_names:
            set_forward(module, _segmented_forward(type(module)))


def _segmented_forward(kind: type[nn.Module]) -> Forward:
    alone: Forward = kind.forward

    @wraps(alone)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sequence = packed_sequence()
        if sequence is None:
            check_recomputation(self)
            return alone(self, *args, **kwargs)
        relies_on_context(self)
        if sequence.sequence_slice is not None and (shared := by_heads(alone)) is not None:
            return shared(self, *args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _PACKING}
        if sequence.sequence_slice is not None:
            args, kwargs = tree_map(partial(_gathered_whole, sequence_slice=sequence.sequence_slice), (args, kwargs))
        outputs = []
        for start, stop in pairwise(sequence.offsets):
            with packed((0, stop - start)):
                sample = cut_tokens((args, kwargs), sequence.offsets[-1], start, stop)
                outputs.append(alone(self, *sample[0], **sample[1]))
        whole = tree_map(partial(_end_to_end, [stop - start for start, stop in pairwise(sequence.offsets)]), *outputs)
        if sequence.sequence_slice is None:
            return whole
        return tree_map_only(Tensor, partial(_kept_tokens, sequence_slice=sequence.sequence_slice), whole)

    return forward


def token_dim(shape: Sequence[int], length: int) -> int | None:
    """Return the first dim after the batch dim of size ``length``; None: no dim has it, or the tensor is square."""
    if _is_square(shape, length):
        return None
    return next((dim for dim in range(1, len(shape)) if shape[dim] == length), None)


def _is_square(shape: Sequence[int], length: int) -> bool:
    """Whether it is a mask or attention weights, ``[1, 1 or heads, T, T]``."""
    return len(shape) == 4 and tuple(shape[-2:]) == (length, length)


def cut_tokens(tree: Any, length: int, start: int, stop: int) -> Any:
    """Slice all tensors along a sequence of ``length`` tokens to ``start:stop``."""

    def cut(value: Any) -> Any:
        if isinstance(value, MaskSpec):
            return value.between(start, stop)
        if not isinstance(value, Tensor):
            return value
        if _is_square(value.shape, length):
            return value[..., start:stop, start:stop]
        dim = token_dim(value.shape, length)
        return value if dim is None else value.narrow(dim, start, stop - start)

    return tree_map(cut, tree)


def _gathered_whole(value: Any, sequence_slice: SequenceSlice) -> Any:
    """Gather a tensor along a slice to the whole sequence."""
    if isinstance(value, MaskSpec):
        return value.whole
    if not isinstance(value, Tensor):
        return value
    if _is_square(value.shape, sequence_slice.positions.numel()):
        raise UserError(
            "ranks cannot share the sequence of this model: its mask covers only the tokens of one rank; set ulysses "
            "and cp to 1"
        )
    dim = token_dim(value.shape, sequence_slice.positions.numel())
    return value if dim is None else sequence_slice.gather(value, dim)


def _kept_tokens(value: Tensor, sequence_slice: SequenceSlice) -> Tensor:
    dim = token_dim(value.shape, sequence_slice.num_tokens)
    return value if dim is None else value.index_select(dim, sequence_slice.positions)


_PACKING = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def _end_to_end(lengths: Sequence[int], *segments: Any) -> Any:
    """Concatenate the outputs of all segments; a tensor without a dim for tokens (a state) is the last segment's."""
    if not isinstance(segments[-1], Tensor):
        return segments[-1]
    dims = [token_dim(segment.shape, length) for segment, length in zip(segments, lengths, strict=True)]
    return segments[-1] if dims[0] is None else torch.cat(segments, dim=dims[0])


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
            for sample in _samples_of(states[0])
        ]
        return torch.cat(outputs)[..., None]

    return _by_heads(compute, [hidden_states[0].T[..., None]], weight.size(0))[..., 0].T[None]


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
        samples = zip(*map(_samples_of, whole), strict=True)
        return torch.cat([kernel(*(tensor[None] for tensor in sample), **arguments)[0][0] for sample in samples])

    rows = _by_heads(
        compute, [tensor.flatten(2) if tensor.ndim > 2 else tensor[..., None] for tensor in tensors], num_heads
    )
    return rows[None], None


def _by_heads(
    compute: Callable[[Sequence[Tensor], slice], Tensor], tensors: Sequence[Tensor], num_heads: int
) -> Tensor:
    """Run ``compute`` over the whole sequence for this rank's heads; for all heads if their number is not divisible."""
    sequence_slice = _running_sequence().sequence_slice
    assert sequence_slice is not None
    if num_heads % sequence_slice.num_ranks == 0:
        return sequence_slice.by_heads(compute, tensors)
    whole = compute([sequence_slice.gather(tensor, 0) for tensor in tensors], slice(0, num_heads))
    return whole.index_select(0, sequence_slice.positions)


def _samples_of(whole: Tensor) -> list[Tensor]:
    return [whole[start:stop] for start, stop in pairwise(_running_sequence().offsets)]


def _running_sequence() -> PackedSequence:
    sequence = packed_sequence()
    assert sequence is not None
    return sequence
