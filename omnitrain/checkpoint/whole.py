"""State of sharded models and optimizers as whole tensors by name: the same for every layout, and for one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

OptimizerState = dict[str, Any]


def whole_weights(model: torch.nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """The model's ``state_dict`` with whole tensors on the CPU. Every rank that holds a part must call it.

    Args:
        model: sharded or not.
        keep: False: only take part; what comes back is empty, and this rank never has more than one whole tensor.

    Returns:
        Name -> tensor; names of tied parameters share one.
    """
    whole: dict[int, Tensor] = {}
    weights = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in whole:
            tensor = value.full_tensor() if isinstance(value, DTensor) else value
            whole[id(value)] = tensor.detach().cpu() if keep else torch.empty(0)
        if keep:
            weights[name] = whole[id(value)]
    return weights


def whole_optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """An optimizer's state with whole tensors on the CPU, by parameter names. Every rank must call it.

    Returns:
        ``state`` (parameter name -> its tensors; absent: it never had a gradient) and ``param_groups``; on other ranks
        than 0 empty.
    """
    if not optimizer.state:  # asking would fill it, and so change later updates
        return {"state": {}, "param_groups": []}
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_whole_optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Continue from what :func:`whole_optimizer_state` returned, under any layout.

    Args:
        model: whose trainable parameters ``optimizer`` updates, the same by name as when the state was taken.
        optimizer: of the same class.
        state: the same on every rank.
    """
    if not state["state"]:
        return
    parameters = dict(model.named_parameters())
    # torch would cut whole tensors itself, but not where two meshes cut the same dim unevenly.
    cut = {
        name: {key: _part(value, parameters[name]) for key, value in values.items()} if name in parameters else values
        for name, values in state["state"].items()
    }
    options = StateDictOptions(strict=False)  # some never had a gradient
    set_optimizer_state_dict(model, optimizer, state | {"state": cut}, options=options)
    for name, parameter in parameters.items():
        if name not in state["state"]:
            optimizer.state.pop(parameter, None)  # torch gave it one, as if it had seen a gradient


def _part(value: Any, parameter: Tensor) -> Any:
    """What this rank has of a whole tensor that belongs to ``parameter``."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None).clone()
