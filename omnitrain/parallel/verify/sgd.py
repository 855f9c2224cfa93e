"""SGD with momentum, in plain tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from omnitrain.optim.shards import gradient_shard, local_shard


class ShardedSGD(torch.optim.Optimizer):
    """``torch.optim.SGD`` on each rank's shards as plain tensors: DTensor takes longer than a small model's steps."""

    def __init__(self, params: Iterable[nn.Parameter] | list[dict[str, Any]], lr: float, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = gradient_shard(parameter.grad, parameter)
                if group["momentum"]:
                    state = self.state[parameter]
                    if "momentum_buffer" in state:
                        direction = state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
                    else:
                        direction = state["momentum_buffer"] = direction.clone()
                local_shard(parameter).add_(direction, alpha=-group["lr"])
