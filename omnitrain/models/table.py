"""What a model is made of: one line per component."""

from __future__ import annotations

from dataclasses import dataclass

from omnitrain.models.omni import OmniModel
from omnitrain.ops.attention import ATTENTION_NAME


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


def component_rows(model: OmniModel) -> list[ComponentRow]:
    """The table that start-up prints."""
    return [_row(name, module) for name, module in model.components.items()]


def _row(name: str, module: object) -> ComponentRow:
    parameters = list(module.parameters())  # type: ignore[attr-defined]
    inner = getattr(module, "tower", None) or getattr(module, "tokenizer", None)
    class_name = type(inner or module).__name__
    return ComponentRow(
        name=name,
        class_name=class_name,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        dtype="+".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        ops=_ops(module),
    )


def _ops(module: object) -> str:
    names = {
        config._attn_implementation_internal
        for m in module.modules()  # type: ignore[attr-defined]
        if hasattr(config := getattr(m, "config", None), "_attn_implementation_internal") and hasattr(m, "is_causal")
    }
    shown = {"segment sdpa" if name == ATTENTION_NAME else str(name) for name in names}
    return f"attention: {', '.join(sorted(shown))}" if shown else ""
