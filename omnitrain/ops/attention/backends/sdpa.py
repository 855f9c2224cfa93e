"""torch's scaled dot-product attention, one call per batch of segments, on every device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from omnitrain.ops.attention.backends.ragged import MAX_HEAD_DIM
from omnitrain.ops.attention.backends.segments import Batch, attend_in_batches
from omnitrain.ops.attention.spec import (
    CAUSAL,
    EVERYTHING,
    POSITION_BIAS,
    SINKS,
    SOFTCAP,
    AttentionBackend,
    AttentionCall,
    repeat_heads,
)

SHORT = 64  # tokens of a segment; above about this length torch's CPU kernel is faster


def attend(call: AttentionCall) -> Tensor:
    """See :class:`AttentionBackend`."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        if not takes_grouped_heads(q, v, batch.mask):
            k, v = repeat_heads(k, q.size(1)), repeat_heads(v, q.size(1))
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=batch.mask,
            dropout_p=call.dropout,
            is_causal=batch.causal and batch.length > 1,
            scale=call.scale,
            enable_gqa=q.size(1) != k.size(1),
        )

    return attend_in_batches(call, kernel, short=SHORT if _may_be_short(call) else 0)


def takes_grouped_heads(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether torch has a kernel for fewer key heads than query heads; else it would compute all scores in memory.

    On CUDA this is flash attention, which takes no mask, no fp32 and no values of another width.
    """
    if not query.is_cuda:
        return True
    width = query.size(-1)
    return mask is None and query.dtype in (torch.float16, torch.bfloat16) and width == value.size(-1) <= MAX_HEAD_DIM


def _may_be_short(call: AttentionCall) -> bool:
    """Whether short segments may use explicit scores; towers stay bit-identical to plain transformers."""
    dtypes = {x.dtype for x in (call.query, call.key, call.value)}
    plain = call.dropout == 0 and call.mask.kind == CAUSAL
    return plain and call.query.device.type == "cpu" and dtypes == {torch.float32}


SDPA = AttentionBackend(
    name="sdpa", honours=EVERYTHING - {SINKS, SOFTCAP, POSITION_BIAS}, obstacle=lambda _: None, attend=attend
)
