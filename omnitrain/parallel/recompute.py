"""Activation recompute by transformers' own checkpointing layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from omnitrain.ops.attention import packed, packed_borders
from omnitrain.ops.attention.packing import Borders
from omnitrain.ops.unread_rows import ReadRows, reading, rows_read


def recompute_blocks(model: nn.Module) -> None:
    """Keep only the inputs of every block that transformers can recompute; compute the rest again in the backward.

    Args:
        model: its HF models are told so; they do it in training mode.
    """
    options = {"use_reentrant": False, "context_fn": _contexts}
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or not module.supports_gradient_checkpointing:
            continue
        if hasattr(module, "activation_checkpointing_enable"):
            module.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:  # its name before transformers 5.20
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For forward and recompute: the latter happens after the contexts of the row were left."""
    return nullcontext(), _again(packed_borders(), rows_read())


@contextmanager
def _again(borders: Borders | None, read: ReadRows | None) -> Iterator[None]:
    with packed(borders), reading(read):
        yield
