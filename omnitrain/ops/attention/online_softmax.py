"""Attention of a block of queries to a block of keys, and the sum of blocks.

A block gives its output and the logarithm of its sum of exponentials (lse). Two blocks of the same queries combine to

    lse = log(exp(lse_1) + exp(lse_2)),    out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

and with the final ``lse`` and ``delta = sum(out * grad)`` the gradients of the blocks are independent of each other
(FlashAttention-2, arXiv 2307.08691, algorithm 2; RingAttention, arXiv 2310.01889).

Shapes: ``H`` heads, ``K`` key heads, ``N`` queries, ``M`` keys, ``D`` head dimension, ``E`` width of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from omnitrain import torch_private
from omnitrain.ops.attention.backends.ragged import aligned, obstacle_of, padded
from omnitrain.ops.attention.spec import MaskSpec, repeat_heads
from omnitrain.plan.ring import FULL, MASKED, Block, Run, block_between, seen_before_and_after

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


# The most scores in memory at once; queries are processed in runs that fit.
SCORES_AT_ONCE = 2**22


@dataclass(frozen=True, eq=False)
class Scoring:
    """How scores are computed: the mask of the sequence, a factor, and then ``softcap * tanh(score / softcap)``."""

    mask: MaskSpec
    scale: float
    softcap: float | None


class RunningSoftmax:
    """``out`` ``[H, N, E]`` and ``lse`` ``[H, N]`` of some queries over the keys added so far, fp32 or wider."""

    def __init__(self, query: Tensor, value_width: int) -> None:
        dtype = _wide(query)
        self.out = query.new_zeros(*query.shape[:2], value_width, dtype=dtype)
        self.lse = query.new_full(query.shape[:2], -torch.inf, dtype=dtype)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Add a block for the queries ``rows``."""
        before = self.lse[:, rows]
        total = torch.logaddexp(before, lse)
        self.out[:, rows] = self.out[:, rows] * _share(before, total)[..., None] + out * _share(lse, total)[..., None]
        self.lse[:, rows] = total

    def add_sinks(self, sinks: Tensor) -> None:
        """Add a key with score ``sinks`` ``[H]`` and value zero to each head."""
        total = torch.logaddexp(self.lse, sinks.to(self.lse)[:, None])
        self.out *= _share(self.lse, total)[..., None]
        self.lse = total


def blocks_between(mask: MaskSpec, queries: Run, keys: Run, device: torch.device) -> tuple[Block, ...]:
    """Return the visible blocks between two runs of one segment; layers share the result for general masks."""
    if mask.general is None:
        block = block_between(queries, keys, causal=mask.causal, window=mask.window)
        return () if block is None else (block,)
    return mask.remember((queries, keys, device), lambda: _evaluated(mask, queries, keys, device))


def attend_block(states: States, block: Block, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return a block's output ``[H, N, E]`` and lse ``[H, N]``, by a kernel if there is one; -inf: nothing is seen."""
    query, key, value = states
    if (kernel := kernel_for(query, value, block, scoring.mask, scoring.softcap)) is not None:
        return kernel.attend(states, seen_before_and_after(block, scoring.mask.window), scoring.scale)
    state = RunningSoftmax(query, value.size(-1))
    for rows, columns, part in _parts(len(query), block, scoring):
        scores = _scores(query[:, rows], key[:, columns], part, scoring)[0]
        lse = scores.logsumexp(-1, keepdim=True)
        state.out[:, rows] = (_share(scores, lse) @ value[:, None, columns].to(scores.dtype)).flatten(0, 1)
        state.lse[:, rows] = lse.flatten(0, 1)[..., 0]
    return state.out, state.lse


def attend_block_backward(
    grad: Tensor, states: States, out: Tensor, lse: Tensor, block: Block, scoring: Scoring
) -> States:
    """Compute a block's contribution to the gradients of ``states``; ``grad``, ``out``, ``lse`` are over all keys."""
    query, key, value = states
    if (kernel := kernel_for(query, value, block, scoring.mask, scoring.softcap)) is not None:
        seen = seen_before_and_after(block, scoring.mask.window)
        return kernel.attend_backward(grad, states, out, lse, seen, scoring.scale)
    dq, dk, dv = (torch.zeros_like(x, dtype=_wide(x)) for x in states)
    delta = row_products(out, grad)
    for rows, columns, part in _parts(len(query), block, scoring):
        scores, slope = _scores(query[:, rows], key[:, columns], part, scoring)
        weights = _share(scores, _grouped(lse[:, rows, None], len(key)))
        of_rows = _grouped(grad[:, rows], len(key)).to(scores.dtype)
        dv[:, columns] += (weights.mT @ of_rows).sum(1)
        of_weights = of_rows @ value[:, None, columns].to(scores.dtype).mT
        of_scores = weights * (of_weights - _grouped(delta[:, rows, None], len(key)).to(scores.dtype)) * scoring.scale
        if slope is not None:
            of_scores = of_scores * slope
        dq[:, rows] = (of_scores @ key[:, None, columns].to(scores.dtype)).flatten(0, 1)
        dk[:, columns] += (of_scores.mT @ _grouped(query[:, rows], len(key)).to(scores.dtype)).sum(1)
    return dq, dk, dv


def row_products(out: Tensor, grad: Tensor) -> Tensor:
    """Sum the products of output and gradient ``[H, N, E]`` to ``[H, N]``, fp32 or wider; rounded once."""
    return (out.to(_wide(out)) * grad).sum(-1)


def _parts(num_heads: int, block: Block, scoring: Scoring) -> Iterator[tuple[slice, slice, Block]]:
    """Split the block into runs of queries: their rows, and the columns of the keys that they may see."""
    (first, end), (first_key, end_key) = block.queries, block.keys
    step = max(1, SCORES_AT_ONCE // (num_heads * (end_key - first_key)))
    for start in range(first, end, step):
        part: Block | None = Block((start, min(start + step, end)), block.keys, block.kind)
        if block.kind != FULL and scoring.mask.general is None:
            causal, window = scoring.mask.causal, scoring.mask.window
            part = block_between((start, min(start + step, end)), block.keys, causal=causal, window=window)
        if part is not None:
            rows = slice(part.queries[0] - first, part.queries[1] - first)
            yield rows, slice(part.keys[0] - first_key, part.keys[1] - first_key), part


def _scores(query: Tensor, key: Tensor, block: Block, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
    """The scores ``[K, H / K, N, M]``, and the derivative of the softcap."""
    dtype, slope = _wide(query), None
    scores = _grouped(query, len(key)).to(dtype) @ key[:, None].to(dtype).mT * scoring.scale
    if scoring.softcap is not None:
        capped = torch.tanh(scores / scoring.softcap)
        scores, slope = scoring.softcap * capped, 1 - capped.square()
    if block.kind == FULL:
        return scores, slope
    mask = scoring.mask.block_mask(block.queries, block.keys, query.device)[0]
    mask = mask[:, None] if len(mask) == 1 else mask.unflatten(0, (len(key), -1))
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask, slope


def _evaluated(mask: MaskSpec, queries: Run, keys: Run, device: torch.device) -> tuple[Block, ...]:
    """Evaluate a general mask between two runs; a float mask is never a full block."""
    (first, end), step = queries, max(1, SCORES_AT_ONCE // (keys[1] - keys[0]))
    sees, sees_all = False, True
    for start in range(first, end, step):
        seen = mask.block_mask((start, min(start + step, end)), keys, device)
        seen = seen if seen.dtype == torch.bool else seen > -torch.inf
        sees, sees_all = sees or bool(seen.any()), sees_all and bool(seen.all())
    is_full = sees_all and not (isinstance(mask.general, Tensor) and mask.general.dtype != torch.bool)
    return (Block(queries, keys, FULL if is_full else MASKED),) if sees else ()


def _share(part: Tensor, total: Tensor) -> Tensor:
    """``exp(part - total)``; 0 if both are -inf."""
    difference = part - total
    return torch.where(difference.isnan(), 0, difference.exp())


def _grouped(x_HNX: Tensor, key_heads: int) -> Tensor:
    return x_HNX.unflatten(0, (key_heads, -1))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
