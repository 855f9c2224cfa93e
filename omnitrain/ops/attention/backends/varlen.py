"""torch's attention over packed sequences, on CUDA."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from omnitrain.ops.attention.backends.ragged import Ragged, attend_ragged, obstacle
from omnitrain.ops.attention.spec import (
    CAUSAL,
    FULL,
    GQA,
    VALUE_WIDTH,
    WINDOW,
    AttentionBackend,
    AttentionCall,
    repeat_heads,
)


def attend(call: AttentionCall) -> torch.Tensor:
    """See :class:`AttentionBackend`."""
    function = _function()

    def kernel(packed: Ragged) -> torch.Tensor:
        key, value, grouped = packed.key, packed.value, {}
        if packed.query.size(1) != key.size(1) and _takes_grouped_heads(function):
            grouped = {"enable_gqa": True}
        else:
            key, value = repeat_heads(key, packed.query.size(1)), repeat_heads(value, packed.query.size(1))
        offsets, length = packed.offsets, packed.max_length
        return function(
            packed.query,
            key,
            value,
            offsets,
            offsets,
            length,
            length,
            scale=call.scaling,
            window_size=packed.window,
            **grouped,
        )

    return attend_ragged(call, kernel)


def _function() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@lru_cache(maxsize=1)
def _takes_grouped_heads(function: Callable[..., Any]) -> bool:
    """Whether keys may have fewer heads than queries; since torch 2.12."""
    return "enable_gqa" in inspect.signature(function).parameters


VARLEN = AttentionBackend(
    name="varlen",
    honours=frozenset({FULL, CAUSAL, WINDOW, GQA, VALUE_WIDTH}),
    obstacle=obstacle,
    attend=attend,
    automatic_on=frozenset({"cuda"}),
)
