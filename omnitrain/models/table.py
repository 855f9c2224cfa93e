"""What a model is made of: one line per component."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omnitrain.models.omni import OmniModel
from omnitrain.ops.attention import plain_implementation


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
    return [_row(model, name, module) for name, module in model.components.items()]


def _row(model: OmniModel, name: str, module: Any) -> ComponentRow:
    parameters = list(module.parameters())
    inner = getattr(module, "tower", None) or getattr(module, "tokenizer", None)
    return ComponentRow(
        name=name,
        class_name=type(module).__name__ + (f" ({type(inner).__name__})" if inner is not None else ""),
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        dtype="+".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        ops=_ops(model, name, module),
    )


def _ops(model: OmniModel, name: str, module: Any) -> str:
    layers = [m for m in module.modules() if hasattr(m, "is_causal") and hasattr(m, "config")]
    names = sorted({plain_implementation(layer.config) for layer in layers})
    shown = [f"attention: {', '.join(names)}"] if names else []
    if name == "foundation":
        contract = model.runner.contract
        shown.append("loss: inside the head" if contract.head == "inside" else "loss: on the logits of supervised rows")
        shown += [] if contract.packs else ["one sample per row"]
        shown += [f"sample by sample: {', '.join(contract.segmented)}"] if contract.segmented else []
    return ", ".join(shown)
