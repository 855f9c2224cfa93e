"""The table of a model's components, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from omnitrain.models.components.model import ComponentModel
from omnitrain.models.hf.hub_kernels import kernels_of
from omnitrain.ops.attention.install import plain_implementation
from omnitrain.ops.fused.install import FusedOp


@dataclass(frozen=True)
class ComponentRow:
    """One line of the table."""

    name: str  # of the component
    class_name: str  # class of its module (and of the HF model inside)
    parameters: int  # number of elements
    trainable: int  # number of elements
    dtype: str  # of the parameters; several are joined by `+`
    ops: str  # backend of each operation


def component_rows(
    model: ComponentModel, fused: Mapping[str, Mapping[str, FusedOp]] | None = None
) -> list[ComponentRow]:
    """Return the table that start-up prints; ``fused``: component name -> result of :func:`fuse_ops`."""
    done = fused or {}
    return [_row(model, name, parameters, done.get(name, {})) for name, parameters in model.components.items()]


def _row(
    model: ComponentModel, name: str, parameters: dict[str, nn.Parameter], fused: Mapping[str, FusedOp]
) -> ComponentRow:
    values = list(parameters.values())
    fused_ops = [f"{op}: {done.backend} ({done.classes.total()})" for op, done in fused.items() if done.classes]
    return ComponentRow(
        name=name,
        class_name=_class_name(model, name, parameters),
        parameters=sum(p.numel() for p in values),
        trainable=sum(p.numel() for p in values if p.requires_grad),
        dtype="+".join(sorted({str(p.dtype).removeprefix("torch.") for p in values})),
        ops=", ".join([*_ops(model, name), *fused_ops]),
    )


def _class_name(model: ComponentModel, name: str, parameters: dict[str, nn.Parameter]) -> str:
    if name in model.runner.native.components and name != "foundation":
        # The component lies inside the foundation: show the modules that hold its parameters.
        return ", ".join(sorted({".".join(path.split(".")[1:3]) for path in parameters}))
    module = model.get_submodule(name)
    inner = getattr(module, "tower", None) or getattr(module, "tokenizer", None)
    names = [type(part).__name__.removeprefix("FSDP") for part in (module, inner) if part is not None]  # if sharded
    return names[0] + (f" ({names[1]})" if names[1:] else "")


def _ops(model: ComponentModel, name: str) -> list[str]:
    if name in model.runner.native.components and name != "foundation":
        return []
    module = model.get_submodule(name)
    layers = [m for m in module.modules() if hasattr(m, "is_causal") and hasattr(m, "config")]
    names = sorted({plain_implementation(layer.config) for layer in layers})
    shown = [f"attention: {', '.join(names)}"] if names else []
    if name == "foundation":
        contract = model.runner.contract
        shown.append(
            "loss: inside the head" if contract.head == "inside" else "loss: on the logits of supervised tokens"
        )
        shown += [] if contract.packs else ["one sample per pack"]
        if in_forward := ", ".join(model.runner.native.in_forward):
            shown.append(f"{in_forward}: in its own forward, one sample per pack")
        shown += [f"sample by sample: {', '.join(contract.segmented)}"] if contract.segmented else []
        shown += map(str, kernels_of(module))
    return shown
