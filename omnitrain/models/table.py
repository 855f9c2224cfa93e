"""What a model is made of: one line per component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnitrain.models.omni import OmniModel
from omnitrain.ops.attention import ATTENTION_NAME
from omnitrain.ops.fuse import FusedOp


@dataclass(frozen=True)
class ComponentRow:
    """One component.

    Attributes:
        name: component name.
        class_name: of its module (and of the HF model inside).
        parameters: elements.
        trainable: elements that train.
        dtype: of the parameters, several joined by ``+``.
        ops: backend per operation.
    """

    name: str
    class_name: str
    parameters: int
    trainable: int
    dtype: str
    ops: str


def component_rows(model: OmniModel, fused: Mapping[str, Mapping[str, FusedOp]] | None = None) -> list[ComponentRow]:
    """The table that start-up prints; ``fused``: component name -> what :func:`fuse_ops` did there."""
    return [_row(name, module, (fused or {}).get(name, {})) for name, module in model.components.items()]


def _row(name: str, module: Any, fused: Mapping[str, FusedOp]) -> ComponentRow:
    parameters = list(module.parameters())
    inner = getattr(module, "tower", None) or getattr(module, "tokenizer", None)
    return ComponentRow(
        name=name,
        class_name=type(module).__name__ + (f" ({type(inner).__name__})" if inner is not None else ""),
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        dtype="+".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        ops=", ".join(
            [
                *_attention(module),
                *(f"{op} ({done.classes.total()}): {done.backend}" for op, done in fused.items() if done.classes),
            ]
        ),
    )


def _attention(module: Any) -> list[str]:
    layers = [m for m in module.modules() if hasattr(m, "is_causal") and hasattr(m, "config")]
    names = {layer.config._attn_implementation_internal for layer in layers}
    shown = {"segment sdpa" if name == ATTENTION_NAME else str(name) for name in names}
    return [f"attention: {'+'.join(sorted(shown))}"] if shown else []
