"""torch's attention over ragged rows, on CUDA."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from omnitrain.ops.attention.backends.ragged import Ragged, attend_ragged, obstacle
from omnitrain.ops.attention.spec import CAUSAL, FULL, GQA, VALUE_WIDTH, WINDOW, Backend, Call, repeat_heads


def attend(call: Call) -> torch.Tensor:
    """See :class:`Backend`."""
    function = _function()

    def kernel(rows: Ragged) -> torch.Tensor:
        key, value, grouped = rows.key, rows.value, {}
        if rows.query.size(1) != key.size(1) and _takes_grouped_heads(function):
            grouped = {"enable_gqa": True}
        else:
            key, value = repeat_heads(key, rows.query.size(1)), repeat_heads(value, rows.query.size(1))
        offsets, length = rows.offsets, rows.max_length
        return function(
            rows.query,
            key,
            value,
            offsets,
            offsets,
            length,
            length,
            scale=call.scaling,
            window_size=rows.window,
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


VARLEN = Backend(
    name="varlen",
    honours=frozenset({FULL, CAUSAL, WINDOW, GQA, VALUE_WIDTH}),
    obstacle=obstacle,
    attend=attend,
    automatic_on=frozenset({"cuda"}),
)
