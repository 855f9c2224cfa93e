"""Modules that carry state along the row (linear attention, short convolutions), run one packed sample at a time.

Where several ranks share the row, linear attention is divided by heads (``by_heads``). Other layers run over all of it
on each rank, which keeps its own tokens: the gradients of their parameters are parts that add up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from omnitrain.errors import UserError
from omnitrain.models.foundation.linear_attention_heads import by_heads
from omnitrain.ops.attention import MaskSpec, RowPart, packed, packed_row
from omnitrain.ops.attention.packed_context import check_recomputation, relies_on_context
from omnitrain.ops.patch_forward import Forward, set_forward


def run_by_segment(model: nn.Module, class_names: Sequence[str]) -> None:
    """Make every module of these classes run each sample of a whole packed row by itself; otherwise it stays as it is.

    Only the ``forward`` of the modules changes: classes, parameters and names stay. To do it twice is to do it once.

    Args:
        model: changed in place.
        class_names: names of classes of its modules.
    """
    for module in model.modules():
        if type(module).__name__ in class_names:
            set_forward(module, _segmented_forward(type(module)))


def _segmented_forward(kind: type[nn.Module]) -> Forward:
    alone: Forward = kind.forward

    @wraps(alone)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        row = packed_row()
        if row is None:
            check_recomputation(self)
            return alone(self, *args, **kwargs)
        relies_on_context(self)
        if row.part is not None and (shared := by_heads(alone)) is not None:
            return shared(self, *args, **kwargs)
        if row.part is not None:
            args, kwargs = gathered_whole((args, kwargs), row.part)
        outputs = []
        for start, stop in pairwise(row.borders):
            with packed((0, stop - start)):
                sample = cut_rows((args, kwargs), row.borders[-1], start, stop)
                outputs.append(alone(self, *sample[0], **sample[1]))
        whole = _end_to_end(outputs, [stop - start for start, stop in pairwise(row.borders)])
        return whole if row.part is None else keep_rows(whole, row.part)

    return forward


def row_dim(shape: Sequence[int], length: int) -> int | None:
    """The dim of a tensor that runs along a row of ``length`` tokens, behind the batch's; None: no single one."""
    if _is_square(shape, length):
        return None
    return next((dim for dim in range(1, len(shape)) if shape[dim] == length), None)


def _is_square(shape: Sequence[int], length: int) -> bool:
    """A mask or attention weights, ``[1, 1 or heads, T, T]``."""
    return len(shape) == 4 and tuple(shape[-2:]) == (length, length)


def cut_rows(value: Any, length: int, start: int, stop: int) -> Any:
    """The part of everything that runs along a row of ``length`` tokens; packing arguments are left out."""
    if isinstance(value, MaskSpec):
        return value.between(start, stop)
    if isinstance(value, Tensor):
        if _is_square(value.shape, length):
            return value[..., start:stop, start:stop]
        dim = row_dim(value.shape, length)
        return value if dim is None else value.narrow(dim, start, stop - start)
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if key not in _PACKING}
    return each(value, lambda item: cut_rows(item, length, start, stop))


def gathered_whole(value: Any, part: RowPart) -> Any:
    """The whole row of everything that runs along a part of it."""
    if isinstance(value, MaskSpec):
        return value.whole
    if isinstance(value, Tensor):
        if _is_square(value.shape, part.rows.numel()):
            raise UserError("a mask of the tokens of one rank says nothing of the others: no ranks can share a row")
        dim = row_dim(value.shape, part.rows.numel())
        return value if dim is None else part.gather(value, dim)
    return each(value, lambda item: gathered_whole(item, part))


def keep_rows(value: Any, part: RowPart) -> Any:
    """The tokens of a part, of everything that runs along the whole row."""
    if isinstance(value, Tensor):
        dim = row_dim(value.shape, part.num_tokens)
        return value if dim is None else value.index_select(dim, part.rows)
    return each(value, lambda item: keep_rows(item, part))


def each(value: Any, change: Callable[[Any], Any]) -> Any:
    """What ``change`` makes of each item of a list, tuple or dict; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(change(item) for item in value)
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    return value


_PACKING = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def _end_to_end(outputs: list[Any], lengths: list[int]) -> Any:
    """The outputs of all segments end to end; what does not run along the row (a state) is the last one's."""
    last = outputs[-1]
    if isinstance(last, Tensor):
        dims = [row_dim(part.shape, length) for part, length in zip(outputs, lengths, strict=True)]
        return last if dims[0] is None else torch.cat(outputs, dim=dims[0])
    if isinstance(last, (list, tuple)):
        return type(last)(_end_to_end(list(parts), lengths) for parts in zip(*outputs, strict=True))
    return last
