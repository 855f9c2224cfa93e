"""What kernels for ragged rows take: rows first, borders as a tensor, windows as ``(left, right)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from omnitrain.ops.attention.spec import Call

MAX_HEAD_DIM = 256
_ALIGNED = 8  # kernels read heads in pieces of so many entries


@dataclass(frozen=True)
class Ragged:
    """A call as these kernels take it.

    Attributes:
        query: ``[T, heads, D]``. ``D`` is a multiple of 8: narrower heads are filled up with zeros, which adds nothing
            to a score, so scores are to be scaled by the head dimension of the call.
        key: ``[T, key heads, D]``.
        value: ``[T, key heads, D]``: narrower values are filled up, too.
        borders: ``[segments + 1]``, int32.
        max_length: tokens of the longest segment.
        window: tokens seen before and after a token's own; -1: all.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    borders: torch.Tensor
    max_length: int
    window: tuple[int, int]


def attend_ragged(call: Call, kernel: Callable[[Ragged], torch.Tensor]) -> torch.Tensor:
    """``kernel``, which gives ``[T, heads, D]``, for a call whose values are not wider than its keys."""
    mask, width = call.mask, call.value.size(-1)
    device = call.query.device
    head_dim = -(-call.query.size(-1) // _ALIGNED) * _ALIGNED
    borders = mask.remember(device, lambda: torch.tensor(mask.borders, dtype=torch.int32).to(device, non_blocking=True))
    left = -1 if mask.window is None else mask.window - 1
    output = kernel(
        Ragged(
            query=_filled_up(call.query[0].transpose(0, 1), head_dim),
            key=_filled_up(call.key[0].transpose(0, 1), head_dim),
            value=_filled_up(call.value[0].transpose(0, 1), head_dim),
            borders=borders,
            max_length=mask.max_length,
            window=(left, 0 if mask.causal else -1),
        )
    )
    return output[None, ..., :width]


def _filled_up(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Torch pads by nothing with a copy, in every layer."""
    missing = head_dim - states.size(-1)
    return F.pad(states, (0, missing)) if missing else states


def obstacle(call: Call) -> str | None:
    """Why a flash kernel cannot run ``call``; None: it can."""
    if call.query.device.type != "cuda":
        return f"it runs on CUDA only, and this is {call.query.device.type}"
    if call.query.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16 only, and this is {call.query.dtype}"
    if call.query.size(-1) > MAX_HEAD_DIM or call.value.size(-1) > call.query.size(-1):
        return f"head dimension {call.query.size(-1)} with values of {call.value.size(-1)} does not fit its kernel"
    return None
