"""The ``flash_attn`` package on CUDA, if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from torch import Tensor

from omnitrain.ops.attention.backends import ragged
from omnitrain.ops.attention.spec import (
    CAUSAL,
    DROPOUT,
    FULL,
    GQA,
    SOFTCAP,
    VALUE_WIDTH,
    WINDOW,
    AttentionBackend,
    AttentionCall,
)
from omnitrain.packages import install_command


def attend(call: AttentionCall) -> Tensor:
    """See :class:`AttentionBackend`."""
    function = _function()

    def kernel(packed: ragged.Ragged) -> Tensor:
        return function(
            *(packed.query, packed.key, packed.value),
            cu_seqlens_q=packed.offsets,
            cu_seqlens_k=packed.offsets,
            max_seqlen_q=packed.max_length,
            max_seqlen_k=packed.max_length,
            dropout_p=call.dropout,
            softmax_scale=call.scaling,
            causal=call.mask.causal,
            window_size=packed.window,
            softcap=call.softcap or 0.0,
        )

    return ragged.attend_ragged(call, kernel)


_find = cache(find_spec)


def obstacle(call: AttentionCall) -> str | None:
    """Return why the backend cannot run ``call``; None: it can."""
    return ragged.obstacle(call) if _find("flash_attn") else f"flash_attn is not installed ({install_command('flash')})"


def _function() -> Callable[..., Tensor]:
    return import_module("flash_attn").flash_attn_varlen_func


FLASH = AttentionBackend(
    name="flash",
    honours=frozenset({FULL, CAUSAL, WINDOW, GQA, VALUE_WIDTH, DROPOUT, SOFTCAP}),
    obstacle=obstacle,
    attend=attend,
    automatic_on=frozenset({"cuda"}),
)
