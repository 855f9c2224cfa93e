"""Convert a call for varlen kernels: tokens first, ``cu_seqlens`` as a tensor, windows ``(left, right)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from omnitrain.ops.attention.spec import AttentionCall

MAX_HEAD_DIM = 256
_ALIGNED = 8  # the head dimension of these kernels is a multiple of this
_FIRST_CAPABILITY = (8, 0)  # Ampere


@dataclass(frozen=True)
class Ragged:
    """The arguments of these kernels.

    ``query`` ``[T, heads, D]``, ``key`` and ``value`` ``[T, key heads, D]``; ``D`` is a multiple of 8: narrower heads
    are padded with zeros, which do not change a score. The scale must come from the head dimension of the call.
    ``offsets`` is ``[segments + 1]`` int32, ``max_length`` the tokens of the longest segment, ``window`` the numbers of
    tokens that a token sees before and after itself (-1: all).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    offsets: Tensor
    max_length: int
    window: tuple[int, int]


def attend_ragged(call: AttentionCall, kernel: Callable[[Ragged], Tensor]) -> Tensor:
    """Run ``kernel``, which returns ``[T, heads, D]``; the values of ``call`` must not be wider than its keys."""
    mask, width = call.mask, call.value.size(-1)
    device = call.query.device
    head_dim = aligned(call.query.size(-1))
    offsets = mask.remember(device, lambda: torch.tensor(mask.offsets, dtype=torch.int32).to(device, non_blocking=True))
    left = -1 if mask.window is None else mask.window - 1
    output = kernel(
        Ragged(
            query=padded(call.query[0].transpose(0, 1), head_dim),
            key=padded(call.key[0].transpose(0, 1), head_dim),
            value=padded(call.value[0].transpose(0, 1), head_dim),
            offsets=offsets,
            max_length=mask.max_length,
            window=(left, 0 if mask.causal else -1),
        )
    )
    return output[None, ..., :width]


def aligned(head_dim: int) -> int:
    """Return the head dimension to which these kernels need queries, keys and values padded."""
    return -(-head_dim // _ALIGNED) * _ALIGNED


def padded(states: Tensor, width: int) -> Tensor:
    """Pad the last dimension to ``width`` with zeros; the same tensor if it has this width already."""
    missing = width - states.size(-1)
    return F.pad(states, (0, missing)) if missing else states


def obstacle(call: AttentionCall) -> str | None:
    """Return why a flash kernel cannot run ``call``; None: it can."""
    return obstacle_of(call.query, call.value)


def obstacle_of(query: Tensor, value: Tensor) -> str | None:
    """Return why a flash kernel cannot run queries ``[..., D]`` and values ``[..., E]``; None: it can."""
    if query.device.type != "cuda":
        return f"it runs only on CUDA, not on {query.device.type}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes only float16 and bfloat16, not {query.dtype}"
    if query.size(-1) > MAX_HEAD_DIM or value.size(-1) > query.size(-1):
        return f"its kernel does not take head dimension {query.size(-1)} with values of {value.size(-1)}"
    if (capability := torch.cuda.get_device_capability(query.device)) < _FIRST_CAPABILITY:
        return f"it needs compute capability 8.0 or later, and this GPU has {'.'.join(map(str, capability))}"
    return None
