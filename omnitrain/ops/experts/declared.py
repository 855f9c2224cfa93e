"""What transformers' ``use_experts_implementation`` declares of a class of experts, and the weights it speaks of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omnitrain.ops.experts.lora import ExpertAdapter, adapter_names, adapter_scales, parameter_names

_DECLARED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` is a layer's experts, which ask transformers' ``ExpertsInterface`` for their forward."""
    return all(name in vars(module) for name in _DECLARED)


def experts_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of all experts below ``model``, the experts of a layer together."""
    return ((name, module) for name, module in model.named_modules() if is_experts(module))


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of experts that have an expert per entry of their dim 0."""
    layer: Any = module
    first = "gate_up_proj" if layer.has_gate else "up_proj"
    names = (first, "down_proj")
    return (*names, *(f"{name}_bias" for name in names)) if layer.has_bias else names


def matrix_names(module: nn.Module) -> tuple[str, str]:
    """Those of them that are matrices per expert."""
    first, second, *_ = weight_names(module)
    return first, second


def names_by_expert(module: nn.Module) -> tuple[str, ...]:
    """Names of all parameters of experts that have an expert per entry of their dim 0, adapters too."""
    return (*weight_names(module), *adapter_names(module))


def num_experts_of(module: nn.Module) -> int:
    """All experts of the layer, on whatever rank they are."""
    return getattr(module, weight_names(module)[0]).size(0)


class ExpertWeights:
    """The experts that this rank has, in place of their module in a function that computes them.

    Weights are plain tensors: of all experts, or of this rank's where the module's are DTensors. Everything else is the
    module's.

    Attributes:
        module: the experts of a layer.
        num_experts: that are here.
        first: ``[E, out, in]``, or ``[E, in, out]`` where the class is declared transposed.
        down: the same of the second product.
        first_bias: ``[E, out]``, or None.
        down_bias: the same of the second product.
        first_adapter: beside ``first``, or None.
        down_adapter: beside ``down``, or None.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._local = {name: _local(getattr(module, name)) for name in weight_names(module)}
        first = weight_names(module)[0]
        self.first, self.down = self._local[first], self._local["down_proj"]
        self.first_bias = self._local.get(f"{first}_bias")
        self.down_bias = self._local.get("down_proj_bias")
        self.num_experts = self.first.size(0)
        self.first_adapter, self.down_adapter = (_adapter(module, name) for name in matrix_names(module))

    def __getattr__(self, name: str) -> Any:
        local = self.__dict__["_local"]
        return local[name] if name in local else getattr(self.__dict__["module"], name)

    def activate(self, rows: Tensor) -> Tensor:
        """What lies between the two products: the class's own gate, or its activation."""
        layer: Any = self.module
        return layer._apply_gate(rows) if layer.has_gate else layer.act_fn(rows)

    def finish(self, rows: Tensor) -> Tensor:
        """What comes behind the second product of every row; often nothing."""
        layer: Any = self.module
        return layer.post_expert_norm(rows) if getattr(layer, "has_post_expert_norm", False) else rows


def _adapter(module: nn.Module, weight: str) -> ExpertAdapter | None:
    scale = adapter_scales(module).get(weight)
    if scale is None:
        return None
    a, b = (_local(getattr(module, name)) for name in parameter_names(weight))
    return ExpertAdapter(a, b, scale)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
