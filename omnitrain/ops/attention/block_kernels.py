"""Kernels that compute attention of one block and return its log-sum-exp (lse), and gradients from the lse of all keys.

Shapes: ``H`` heads, ``K`` key heads, ``N`` queries, ``M`` keys, ``D`` head dimension, ``E`` width of a value.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from omnitrain.ops.attention.backends.ragged import aligned, obstacle_of, padded
from omnitrain.ops.attention.spec import MaskSpec, repeat_heads
from omnitrain.plan.ring import MASKED, Block
from omnitrain.torch_private import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    flash_attention,
    flash_attention_backward,
)

Seen = tuple[int, int]  # keys before and after a query's own position, see seen_before_and_after
CAUSAL_SEEN = (-1, 0)


class BlockKernel(Protocol):
    """A kernel for blocks that are masked by distance only, without a soft cap."""

    def takes(self, query: Tensor, value: Tensor, block: Block) -> bool:
        """Whether it takes this device, dtype, width and kind of block."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
        """Compute output ``[H, N, E]`` and lse ``[H, N]`` from ``[H, N, D]``, ``[K, M, D]`` and ``[K, M, E]``."""
        ...

    def attend_backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        seen: Seen,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the block's contribution to the gradients of queries, keys and values.

        ``grad`` and ``out`` ``[H, N, E]`` and ``lse`` ``[H, N]`` are over all keys, not only those of the block: the
        kernel computes the weights from ``lse``, and the row sums of the softmax gradient from ``out`` and ``grad``.
        """
        ...


def kernel_for(query: Tensor, value: Tensor, block: Block, mask: MaskSpec, softcap: float | None) -> BlockKernel | None:
    """Return the kernel that computes a block; None: no kernel computes it.

    A window needs at least as many keys as queries: FlashAttention-2 shortens a window that is longer than the keys.
    """
    if softcap is not None or query.dtype != value.dtype:
        return None
    if block.kind == MASKED and (mask.general is not None or query.size(1) > value.size(1)):
        return None
    kernel = KERNELS.get(query.device.type)
    return kernel if kernel is not None and kernel.takes(query, value, block) else None


class CpuFlash:
    """torch's flash attention on CPU. See :class:`BlockKernel`."""

    def takes(self, query: Tensor, value: Tensor, block: Block) -> bool:  # noqa: D102
        return block.kind != MASKED and query.size(-1) == value.size(-1)

    def attend(  # noqa: D102
        self, query: Tensor, key: Tensor, value: Tensor, seen: Seen, scale: float
    ) -> tuple[Tensor, Tensor]:
        states = _equal_heads(query, key, value)
        out, lse = cpu_flash_attention(*states, 0.0, seen == CAUSAL_SEEN, scale=scale)
        return out[0], lse[0]

    def attend_backward(  # noqa: D102
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        seen: Seen,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        states = _equal_heads(query, key, value)
        dq, dk, dv = cpu_flash_attention_backward(
            grad[None], *states, out[None], lse[None], 0.0, seen == CAUSAL_SEEN, scale=scale
        )
        return dq[0], _of_key_heads(dk[0], len(key)), _of_key_heads(dv[0], len(value))


class CudaFlash:
    """torch's flash attention on CUDA. See :class:`BlockKernel`.

    This was not run on a GPU yet. Tests check the arguments against torch's schema, and the results with a model of
    the operation in place of the kernel.
    """

    def takes(self, query: Tensor, value: Tensor, block: Block) -> bool:  # noqa: D102
        return obstacle_of(query, value) is None

    def attend(  # noqa: D102
        self, query: Tensor, key: Tensor, value: Tensor, seen: Seen, scale: float
    ) -> tuple[Tensor, Tensor]:
        width = aligned(query.size(-1))
        out, lse, *_ = flash_attention(
            *(_tokens_first(x, width) for x in (query, key, value)),
            *_lengths(query, key),
            0.0,
            seen == CAUSAL_SEEN,
            return_debug_mask=False,
            scale=scale,
            window_size_left=seen[0],
            window_size_right=seen[1],
        )
        return _heads_first(out, value.size(-1)), lse[0]

    def attend_backward(  # noqa: D102
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        seen: Seen,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = aligned(query.size(-1))
        no_dropout = query.new_empty(0)
        dq, dk, dv = flash_attention_backward(
            *(_tokens_first(x, width) for x in (grad, query, key, value, out)),
            lse[None].contiguous(),  # the kernel reads no strides of the lse
            *_lengths(query, key),
            0.0,
            seen == CAUSAL_SEEN,
            no_dropout,
            no_dropout,
            scale=scale,
            window_size_left=seen[0],
            window_size_right=seen[1],
        )
        return _heads_first(dq, query.size(-1)), _heads_first(dk, key.size(-1)), _heads_first(dv, value.size(-1))


KERNELS: dict[str, BlockKernel] = {"cpu": CpuFlash(), "cuda": CudaFlash()}


def _tokens_first(states_HNX: Tensor, width: int) -> Tensor:
    """``[1, N, H, width]``, padded with zeros."""
    return padded(states_HNX.transpose(0, 1)[None], width)


def _heads_first(states_1NHX: Tensor, width: int) -> Tensor:
    """``[H, N, width]``, without the padding."""
    return states_1NHX[0, ..., :width].transpose(0, 1)


def _lengths(query: Tensor, key: Tensor) -> tuple[None, None, int, int]:
    """Arguments of the CUDA kernels: no ``cu_seqlens`` of queries and keys, numbers of queries and keys."""
    return None, None, query.size(1), key.size(1)


def _equal_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``[1, H, tokens, width]`` each."""
    return query[None], repeat_heads(key[None], len(query)), repeat_heads(value[None], len(query))


def _of_key_heads(grad_HMX: Tensor, key_heads: int) -> Tensor:
    return grad_HMX if len(grad_HMX) == key_heads else grad_HMX.unflatten(0, (key_heads, -1)).sum(1)
