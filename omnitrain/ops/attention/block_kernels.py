"""Kernels that compute attention of one block and return its log-sum-exp (lse), and gradients from the lse of all keys.

Shapes: ``H`` heads, ``K`` key heads, ``N`` queries, ``M`` keys, ``D`` head dimension, ``E`` width of a value.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from omnitrain import torch_private
from omnitrain.ops.attention.backends.ragged import aligned, obstacle_of, padded
from omnitrain.ops.attention.spec import MaskSpec, repeat_heads
from omnitrain.plan.ring import MASKED, Block

States = tuple[Tensor, Tensor, Tensor]  # queries [H, N, D], keys [K, M, D], values [K, M, E]; or their gradients
Seen = tuple[int, int]  # keys before and after a query's own position, see seen_before_and_after
CAUSAL_SEEN = (-1, 0)


class BlockKernel(Protocol):
    """A kernel for blocks that are masked by distance only, without a soft cap."""

    def takes(self, query: Tensor, value: Tensor, block: Block) -> bool:
        """Whether it takes this device, dtype, width and kind of block."""

    def attend(self, states: States, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
        """Compute output ``[H, N, E]`` and lse ``[H, N]``."""

    def attend_backward(
        self, grad: Tensor, states: States, out: Tensor, lse: Tensor, seen: Seen, scale: float
    ) -> States:
        """Compute the block's contribution to the gradients.

        ``grad`` and ``out`` ``[H, N, E]`` and ``lse`` ``[H, N]`` are over all keys, not only those of the block: the
        kernel computes the weights from ``lse``, and the row sums of the softmax gradient from ``out`` and ``grad``.
        """


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

    def attend(self, states: States, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:  # noqa: D102
        out, lse = torch_private.cpu_flash_attention(*_equal_heads(states), 0.0, seen == CAUSAL_SEEN, scale=scale)
        return out[0], lse[0]

    def attend_backward(  # noqa: D102
        self, grad: Tensor, states: States, out: Tensor, lse: Tensor, seen: Seen, scale: float
    ) -> States:
        of_all = (grad[None], *_equal_heads(states), out[None], lse[None])
        dq, dk, dv = torch_private.cpu_flash_attention_backward(*of_all, 0.0, seen == CAUSAL_SEEN, scale=scale)
        return dq[0], _of_key_heads(dk[0], len(states[1])), _of_key_heads(dv[0], len(states[2]))


class CudaFlash:
    """torch's flash attention on CUDA. See :class:`BlockKernel`.

    This was not run on a GPU yet. Tests check the arguments against torch's schema, and the results with a model of
    the operation in place of the kernel.
    """

    def takes(self, query: Tensor, value: Tensor, block: Block) -> bool:  # noqa: D102
        return obstacle_of(query, value) is None

    def attend(self, states: States, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:  # noqa: D102
        out, lse, *_ = torch_private.flash_attention(
            *_tokens_first(*states, width=aligned(states[0].size(-1))),
            *(None, None, states[0].size(1), states[1].size(1)),  # no cu_seqlens; numbers of queries and keys
            *(0.0, seen == CAUSAL_SEEN),
            return_debug_mask=False,
            scale=scale,
            window_size_left=seen[0],
            window_size_right=seen[1],
        )
        return _heads_first(out, states[2].size(-1)), lse[0]

    def attend_backward(  # noqa: D102
        self, grad: Tensor, states: States, out: Tensor, lse: Tensor, seen: Seen, scale: float
    ) -> States:
        no_dropout = grad.new_empty(0)
        dq, dk, dv = torch_private.flash_attention_backward(
            *_tokens_first(grad, *states, out, width=aligned(states[0].size(-1))),
            lse[None].contiguous(),  # the kernel reads no strides of the lse
            *(None, None, states[0].size(1), states[1].size(1)),
            *(0.0, seen == CAUSAL_SEEN, no_dropout, no_dropout),
            scale=scale,
            window_size_left=seen[0],
            window_size_right=seen[1],
        )
        of_query, of_key, of_value = (_heads_first(x, y.size(-1)) for x, y in zip((dq, dk, dv), states, strict=True))
        return of_query, of_key, of_value


KERNELS: dict[str, BlockKernel] = {"cpu": CpuFlash(), "cuda": CudaFlash()}


def _tokens_first(*states_HNX: Tensor, width: int) -> list[Tensor]:
    """``[1, N, H, width]`` each, padded with zeros."""
    return [padded(x_HNX.transpose(0, 1)[None], width) for x_HNX in states_HNX]


def _heads_first(states_1NHX: Tensor, width: int) -> Tensor:
    """``[H, N, width]``, without the padding."""
    return states_1NHX[0, ..., :width].transpose(0, 1)


def _equal_heads(states: States) -> tuple[Tensor, Tensor, Tensor]:
    """``[1, H, tokens, width]`` each."""
    query, key, value = states
    return query[None], repeat_heads(key[None], len(query)), repeat_heads(value[None], len(query))


def _of_key_heads(grad_HMX: Tensor, key_heads: int) -> Tensor:
    return grad_HMX if len(grad_HMX) == key_heads else grad_HMX.unflatten(0, (key_heads, -1)).sum(1)
