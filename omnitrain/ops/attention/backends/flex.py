"""torch's flex attention: one kernel, with the mask as a function; compiled on CUDA, eager elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from omnitrain.ops.attention.spec import DROPOUT, EVERYTHING, AttentionBackend, AttentionCall
from omnitrain.ops.compile.blocks import keep_compilations

_MIN_HEAD_DIM = 16  # the least that the CUDA kernel takes


def attend(call: AttentionCall) -> Tensor:
    """See :class:`AttentionBackend`."""
    from torch.nn.attention.flex_attention import AuxRequest

    keep_compilations()
    output, auxiliary = _function(call.query.is_cuda)(
        call.query,
        call.key,
        call.value,
        score_mod=_score_function(call),
        block_mask=_block_mask(call),
        scale=call.scale,
        enable_gqa=call.query.size(1) != call.key.size(1),
        return_aux=AuxRequest(lse=call.sinks is not None),
    )
    if call.sinks is not None:
        # An additional key with logit s and value 0 scales the output by exp(l) / (exp(l) + exp(s)); l is the lse.
        share = torch.sigmoid(auxiliary.lse - call.sinks.float().view(1, -1, 1))
        output = output * share.unsqueeze(-1).to(output.dtype)
    return output.transpose(1, 2)


def _score_function(call: AttentionCall) -> Callable[..., Tensor] | None:
    cap, bias = call.softcap, call.position_bias
    if cap is None and bias is None:
        return None
    if bias is not None:
        bias = bias.expand(-1, call.query.size(1), -1, -1)

    def change(score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if bias is None else score + bias[0, head, query, key]

    return change


def _block_mask(call: AttentionCall) -> Any:
    mask, device, length = call.mask, call.query.device, call.query.size(2)
    per_head = call.query.size(1) if isinstance(mask.general, Tensor) and mask.general.size(1) > 1 else None
    return mask.remember(
        (FLEX.name, device),
        lambda: _mask_function(device.type == "cuda")(
            mask.packed_function(device), None, per_head, length, length, device=device
        ),
    )


@lru_cache(maxsize=2)
def _function(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: past the recompile limit torch would otherwise run eagerly, with all scores in memory.
    return torch.compile(flex_attention, fullgraph=True) if compiled else flex_attention


@lru_cache(maxsize=2)
def _mask_function(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask) if compiled else create_block_mask


def _obstacle(call: AttentionCall) -> str | None:
    if call.query.device.type == "cpu" and call.has_gradients:
        return "it has no backward on CPU"
    if isinstance(call.mask.general, Tensor) and call.mask.general.dtype != torch.bool:
        return "it takes no float mask, only a function of indices"
    if call.query.is_cuda and min(call.query.size(-1), call.value.size(-1)) < _MIN_HEAD_DIM:
        return f"its CUDA kernel needs a head dimension of at least {_MIN_HEAD_DIM}"
    return None


FLEX = AttentionBackend(
    name="flex", honours=EVERYTHING - {DROPOUT}, obstacle=_obstacle, attend=attend, automatic_on=frozenset({"cuda"})
)
