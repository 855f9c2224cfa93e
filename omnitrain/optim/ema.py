"""An exponential moving average of the trained weights (Polyak & Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from omnitrain.optim.adamw import local_shard
from omnitrain.optim.offload import OffloadedOptimizer, like_parameter

_AVERAGE = "average"


class AveragedWeights(torch.optim.Optimizer):
    """Averages of ``optimizer``'s parameters, fp32, sharded and placed like them; its state dict is an optimizer's."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        """Begin at the values that the parameters have now; ``decay``, below 1, is the weight of the average before."""
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {"decay": decay})
        self._optimizer, self._decay = optimizer, decay
        for parameter in self.param_groups[0]["params"]:
            if not parameter.is_meta:  # another rank holds it
                self.state[parameter][_AVERAGE] = like_parameter(parameter, self._weight(parameter).clone())

    def _weight(self, parameter: nn.Parameter) -> Tensor:
        if isinstance(self._optimizer, OffloadedOptimizer):
            parameter = self._optimizer.stand_in(parameter)
        return local_shard(parameter.detach())

    def _averages(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parameter in self.param_groups[0]["params"]:
            if parameter in self.state:
                yield parameter, local_shard(self.state[parameter][_AVERAGE])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Move the averages after a step of the optimizer. ``closure`` must be None, and None is returned."""
        assert closure is None, "an average has no gradient"
        for parameter, average in self._averages():
            average.lerp_(self._weight(parameter), 1 - self._decay)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict``; a tensor of it may be on another device than the average."""
        for index, state in state_dict["state"].items():
            average = self.state[self.param_groups[0]["params"][index]][_AVERAGE]
            local_shard(average).copy_(local_shard(state[_AVERAGE]))

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Give the parameters the values of their averages while the context is open. All ranks enter together."""
        averages = dict(self._averages())
        trained = {parameter: local_shard(parameter.detach()).clone() for parameter in averages}
        _write(averages)
        try:
            yield
        finally:
            _write(trained)


def _write(values: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, value in values.items():
        # Through `data`, which counts no change: an optimizer would take the rounded values for its fp32 copy.
        local_shard(parameter.detach()).data.copy_(value)
