"""Run modules that carry state along the sequence (linear attention, short convolutions) one packed sample at a time.

If ranks share the sequence, linear attention is split by heads (``by_heads``). Other layers run over the whole sequence
on each rank, which keeps only its tokens: the gradients of their parameters are partial sums over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from omnitrain.errors import UserError
from omnitrain.models.foundation.linear_attention_heads import by_heads
from omnitrain.ops.attention.packed_context import (
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
    """This rank's tokens of a tensor along the whole sequence."""
    dim = token_dim(value.shape, sequence_slice.num_tokens)
    return value if dim is None else value.index_select(dim, sequence_slice.positions)


_PACKING = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def _end_to_end(lengths: Sequence[int], *segments: Any) -> Any:
    """Concatenate the outputs of all segments; a tensor without a dim for tokens (a state) is the last segment's."""
    if not isinstance(segments[-1], Tensor):
        return segments[-1]
    dims = [token_dim(segment.shape, length) for segment, length in zip(segments, lengths, strict=True)]
    return segments[-1] if dims[0] is None else torch.cat(segments, dim=dims[0])
