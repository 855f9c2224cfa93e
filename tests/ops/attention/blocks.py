"""Attention of a sequence by blocks, in one process: what a ring of ranks computes together."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from omnitrain.ops.attention.online_softmax import (
    RunningSoftmax,
    Scoring,
    attend_block,
    attend_block_backward,
    blocks_between,
)
from omnitrain.ops.attention.spec import MaskSpec
from omnitrain.plan.ring import Block

CHUNKS = (0, 24, 48, 72, 96)  # of two cp ranks
SCALE = 0.3


def blocks_of(mask: MaskSpec, device: torch.device) -> list[tuple[slice, slice, Block]]:
    """The rows, columns and block of all pairs of chunks."""
    cuts = sorted({*CHUNKS, *mask.offsets})
    runs = [(run, max(i for i in mask.offsets if i <= run[0])) for run in itertools.pairwise(cuts)]
    return [
        (slice(*block.queries), slice(*block.keys), block)
        for (queries, of_queries), (keys, of_keys) in itertools.product(runs, runs)
        if of_queries == of_keys
        for block in blocks_between(mask, queries, keys, device)
    ]


def by_blocks(states: list[Tensor], grad: Tensor, mask: MaskSpec) -> list[Tensor]:
    """Output and gradients of ``[H, N, D], [K, N, D], [K, N, E]``, as ring attention sums them."""
    query, key, value = states
    scoring = Scoring(mask, SCALE, None)
    state = RunningSoftmax(query, value.size(-1))
    blocks = blocks_of(mask, query.device)
    for rows, columns, block in blocks:
        state.add(rows, *attend_block((query[:, rows], key[:, columns], value[:, columns]), block, scoring))
    out = state.out.to(value.dtype)
    grads = [torch.zeros_like(x, dtype=state.lse.dtype) for x in states]
    for rows, columns, block in blocks:
        of_block = query[:, rows], key[:, columns], value[:, columns]
        parts = attend_block_backward(grad[:, rows], of_block, out[:, rows], state.lse[:, rows], block, scoring)
        for total, place, part in zip(grads, (rows, columns, columns), parts, strict=True):
            total[:, place] += part
    return [out, *grads]
