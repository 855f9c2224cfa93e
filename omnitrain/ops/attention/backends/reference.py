"""The reference: the formula in plain torch with the softmax in fp32. It supports every feature."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from omnitrain.ops.attention.backends.segments import Batch, attend_in_batches
from omnitrain.ops.attention.spec import EVERYTHING, AttentionBackend, AttentionCall, repeat_heads


def attend(call: AttentionCall) -> Tensor:
    """See :class:`AttentionBackend`."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        weights = _weights(call, _masked(_scores(call, q, k, batch), batch))
        return (F.dropout(weights, call.dropout) @ repeat_heads(v, q.size(1)).float()).to(v.dtype)

    return attend_in_batches(call, kernel)


def _scores(call: AttentionCall, q: Tensor, k: Tensor, batch: Batch) -> Tensor:
    scores = q.float() @ repeat_heads(k, q.size(1)).float().mT * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores if call.position_bias is None else scores + batch.cut(call.position_bias)


def _masked(scores: Tensor, batch: Batch) -> Tensor:
    if batch.mask is not None and batch.mask.dtype != torch.bool:
        return scores + batch.mask
    seen = batch.mask
    if batch.causal:
        seen = torch.ones(batch.length, batch.length, dtype=torch.bool, device=scores.device).tril()
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def _weights(call: AttentionCall, scores: Tensor) -> Tensor:
    if call.sinks is None:
        return scores.softmax(-1)
    sinks = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


REFERENCE = AttentionBackend(name="reference", honours=EVERYTHING, obstacle=lambda _: None, attend=attend)
