"""What a model is made of: one line per component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from omnitrain.models.hf.hub_kernels import kernels_of
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.attention import plain_implementation
from omnitrain.ops.fused.install import FusedOp


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
    done = fused or {}
    return [_row(model, name, parameters, done.get(name, {})) for name, parameters in model.components.items()]


def _row(
    model: OmniModel, name: str, parameters: dict[str, nn.Parameter], fused: Mapping[str, FusedOp]
) -> ComponentRow:
    own = list(parameters.values())
    return ComponentRow(
        name=name,
        class_name=_class_name(model, name, parameters),
        parameters=sum(p.numel() for p in own),
        trainable=sum(p.numel() for p in own if p.requires_grad),
        dtype="+".join(sorted({str(p.dtype).removeprefix("torch.") for p in own})),
        ops=", ".join([*_ops(model, name), *_fused(fused)]),
    )


def _class_name(model: OmniModel, name: str, parameters: dict[str, nn.Parameter]) -> str:
    if name in model.runner.native.components and name != "foundation":
        # Where its parameters live in the foundation: the first modules that are not the whole of it.
        return ", ".join(sorted({".".join(path.split(".")[1:3]) for path in parameters}))
    module = model.get_submodule(name)
    inner = getattr(module, "tower", None) or getattr(module, "tokenizer", None)
    names = [type(part).__name__.removeprefix("FSDP") for part in (module, inner) if part is not None]  # if sharded
    return names[0] + (f" ({names[1]})" if names[1:] else "")


def _fused(fused: Mapping[str, FusedOp]) -> list[str]:
    return [f"{op}: {done.backend} ({done.classes.total()})" for op, done in fused.items() if done.classes]


def _ops(model: OmniModel, name: str) -> list[str]:
    if name in model.runner.native.components and name != "foundation":
        return []
    module = model.get_submodule(name)
    layers = [m for m in module.modules() if hasattr(m, "is_causal") and hasattr(m, "config")]
    names = sorted({plain_implementation(layer.config) for layer in layers})
    shown = [f"attention: {', '.join(names)}"] if names else []
    if name == "foundation":
        contract = model.runner.contract
        shown.append("loss: inside the head" if contract.head == "inside" else "loss: on the logits of supervised rows")
        shown += [] if contract.packs else ["one sample per row"]
        if read := ", ".join(model.runner.native.in_forward):
            shown.append(f"{read}: in its own forward, one sample per row")
        shown += [f"sample by sample: {', '.join(contract.segmented)}"] if contract.segmented else []
        shown += map(str, kernels_of(module))
    return shown
