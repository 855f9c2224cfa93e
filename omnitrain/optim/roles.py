"""The roles of a model's parameters: Muon trains matrices, and vectors have no weight decay."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from torch import nn
from transformers.pytorch_utils import Conv1D

from omnitrain.ops.experts.weights import experts_in, matrix_names

Role: TypeAlias = Literal["matrix", "vector", "table"]


def roles_of(model: nn.Module) -> dict[nn.Parameter, Role]:
    """Return the role of each parameter, by what it is in its module.

    Shapes do not tell: experts have biases ``[experts, features]``, and norms of heads weights ``[heads, features]``.

    - ``matrix``: the weight of a linear layer ``[out, in]``, and those of all experts of a layer ``[experts, ...]``.
    - ``vector``: a norm, a bias (by its name), and all else with fewer than two dims.
    - ``table``: all else: embeddings, positions, convolutions, LoRA adapters of experts.

    Args:
        model: parallelized or not.
    """
    roles: dict[nn.Parameter, Role] = {}
    for module in model.modules():
        is_norm = "norm" in type(module).__name__.lower() and not isinstance(module, nn.Embedding)
        for name, parameter in module.named_parameters(recurse=False):
            is_vector = is_norm or parameter.ndim < 2 or "bias" in name.split("_")
            roles[parameter] = "vector" if is_vector else "table"
    matrices: list[Any] = [module.weight for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    matrices += [getattr(module, name) for _, module in experts_in(model) for name in matrix_names(module)]
    return roles | dict.fromkeys(matrices, "matrix")


def decayed_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters to which weight decay applies: all but norms and biases."""
    return {parameter for parameter, role in roles_of(model).items() if role != "vector"}
