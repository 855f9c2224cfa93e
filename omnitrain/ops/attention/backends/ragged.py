"""Convert a call for kernels over ragged rows: tokens first, ``cu_seqlens`` as a tensor, windows ``(left, right)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from omnitrain.ops.attention.spec import Call

MAX_HEAD_DIM = 256
_ALIGNED = 8  # the head dimension of these kernels is a multiple of this


@dataclass(frozen=True)
class Ragged:
    """The arguments of these kernels.

    Attributes:
        query: ``[T, heads, D]``. ``D`` is a multiple of 8: narrower heads are padded with zeros, which do not change a
            score. The scale must come from the head dimension of the call.
        key: ``[T, key heads, D]``.
        value: ``[T, key heads, D]``, padded as well.
        offsets: ``[segments + 1]``, int32.
        max_length: number of tokens of the longest segment.
        window: numbers of tokens that a token sees before and after itself; -1: all.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    offsets: torch.Tensor
    max_length: int
    window: tuple[int, int]


def attend_ragged(call: Call, kernel: Callable[[Ragged], torch.Tensor]) -> torch.Tensor:
    """Run ``kernel``, which returns ``[T, heads, D]``; the values of ``call`` must not be wider than its keys."""
    mask, width = call.mask, call.value.size(-1)
    device = call.query.device
    head_dim = -(-call.query.size(-1) // _ALIGNED) * _ALIGNED
    offsets = mask.remember(device, lambda: torch.tensor(mask.offsets, dtype=torch.int32).to(device, non_blocking=True))
    left = -1 if mask.window is None else mask.window - 1
    output = kernel(
        Ragged(
            query=_padded(call.query[0].transpose(0, 1), head_dim),
            key=_padded(call.key[0].transpose(0, 1), head_dim),
            value=_padded(call.value[0].transpose(0, 1), head_dim),
            offsets=offsets,
            max_length=mask.max_length,
            window=(left, 0 if mask.causal else -1),
        )
    )
    return output[None, ..., :width]


def _padded(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pad only if needed: ``F.pad`` copies even if there is nothing to pad."""
    missing = head_dim - states.size(-1)
    return F.pad(states, (0, missing)) if missing else states


def obstacle(call: Call) -> str | None:
    """Return why a flash kernel cannot run ``call``; None: it can."""
    if call.query.device.type != "cuda":
        return f"it runs only on CUDA, not on {call.query.device.type}"
    if call.query.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes only float16 and bfloat16, not {call.query.dtype}"
    if call.query.size(-1) > MAX_HEAD_DIM or call.value.size(-1) > call.query.size(-1):
        return f"its kernel does not take head dimension {call.query.size(-1)} with values of {call.value.size(-1)}"
    return None
