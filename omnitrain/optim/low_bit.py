"""AdamW with its two moments in 8 bits, in the format of torchao (Dettmers et al. 2022)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from omnitrain.errors import UserError
from omnitrain.optim.adamw import gradient_shard, local_shard
from omnitrain.optim.offload import like_parameter
from omnitrain.packages import install_command
from omnitrain.recipe import Optimizer

_BLOCK = 256  # values with one scale
_LEAST = 4096  # smaller tensors keep fp32, as in bitsandbytes
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # -> whether it has signs


class AdamW8bit(torch.optim.Optimizer):
    """AdamW that keeps its moments in blocks of 256 values of 8 bits with one scale; a step computes in fp32.

    Moments of small tensors, and of shards that blocks do not divide, stay fp32. A state dict has sharded fp32 moments
    in host memory, so a run resumes under any layout, and under the same one with the same values.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, fused: bool = True
    ) -> None:
        """Take parameter groups with ``weight_decay``; other options as of ``torch.optim.AdamW``."""
        self._format = _format()
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "fused": fused})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters from their gradients, one at a time; ``closure`` must be None."""
        assert closure is None, "a closure would compute gradients twice"
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        shard, state = local_shard(parameter), self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=shard.device)
            state |= {name: self._kept(torch.zeros_like(shard), name) for name in _MOMENTS}
        moments = [self._values(state[name]) for name in _MOMENTS]
        first, second = group["betas"]
        adamw(
            [shard],
            [gradient_shard(parameter.grad, parameter)],
            [moments[0]],
            [moments[1]],
            [],
            [state["step"]],
            fused=group["fused"],
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, moment in zip(_MOMENTS, moments, strict=True):
            if state[name] is not moment:
                state[name].copy_(moment)

    def _kept(self, values: Tensor, name: str) -> Tensor:
        """Return fp32 ``values`` in 8 bits. Values that were in 8 bits become the same codes again."""
        if values.numel() < _LEAST or values.numel() % _BLOCK:
            return values
        kept = self._format.OptimState8bit.zeros(values.shape, _MOMENTS[name], _BLOCK, values.device, torch.float32)
        blocks = values.reshape(-1, _BLOCK)
        lowest, scale = blocks.aminmax(dim=1)
        if _MOMENTS[name]:  # the lowest code is not quite -1 times the scale
            scale = torch.where(-lowest >= scale, lowest / kept.qmap[0], scale)
        scale = scale.clamp(min=1e-12)
        scaled = (blocks / scale[:, None]).view(values.shape)
        kept.codes.copy_(self._format.quantize_8bit_with_qmap(scaled, kept.qmap))
        kept.scale.copy_(scale)
        return kept

    def _values(self, kept: Tensor) -> Tensor:
        """Return the fp32 values of a moment: a copy, or the moment itself if it is fp32."""
        return kept.dequantize() if isinstance(kept, self._format.OptimState8bit) else kept

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of AdamW, with fp32 moments in host memory."""
        plain = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        state = {
            index: {"step": values["step"]}
            | {name: like_parameter(parameters[index], self._values(values[name]).cpu()) for name in _MOMENTS}
            for index, values in plain["state"].items()
        }
        return plain | {"state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`, or of AdamW."""
        super().load_state_dict(state_dict | {"state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, values in state_dict["state"].items():
            device = local_shard(parameters[index]).device
            moments = {name: local_shard(values[name]).to(device, torch.float32) for name in _MOMENTS}
            self.state[parameters[index]] = {"step": torch.as_tensor(values["step"], device=device).clone()} | {
                name: self._kept(moment.clone(), name) for name, moment in moments.items()
            }


def require_state_format(settings: Optimizer) -> None:
    """Raise a UserError if the states of a recipe's optimizer cannot be kept in the format that it names."""
    if settings.state == "int8":
        _format()


def _format() -> Any:
    """Return torchao's module of 8-bit states; raise a UserError if it cannot be used."""
    logger = logging.getLogger("torchao")
    level, logger.level = logger.level, logging.ERROR  # its compiled kernels, which nothing here uses, may not fit
    try:
        from torchao.optim import subclass_8bit
    except Exception as error:  # a torchao built for another torch fails in any way
        raise UserError(
            f"train.optimizer.state: 'int8' needs torchao ({type(error).__name__}: {error}); "
            f"{install_command('low-bit')}, or use `float32`"
        ) from None
    finally:
        logger.level = level
    return subclass_8bit
