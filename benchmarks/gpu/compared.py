"""A computation on the device against the same one in fp32 on the CPU, where what rounding explains is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from omnitrain.ops.rounding import DRAWS, Rounding, Step, nudge

Tensors = dict[str, Tensor]
Compute = Callable[[Tensors], Step]
"""Name -> tensor; returns a sum, and name -> output or gradient."""


def excess(inputs: Tensors, cpu: Compute, there: Compute, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest deviation as a multiple of what rounding explains; above 1, it is an error.

    Args:
        inputs: name -> tensor on the CPU, fp32.
        cpu: the reference; runs in fp32, and in ``dtype`` on inputs that are moved to neighbouring numbers.
        there: the computation that is tested.
        device: where that is.
        dtype: in which it computes.
    """
    rounded = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    expected = cpu({name: tensor.float() for name, tensor in rounded.items()})
    loss, found = there({name: tensor.to(device) for name, tensor in rounded.items()})
    return beyond(expected, draws(rounded, cpu), (loss, found))


def draws(inputs: Tensors, cpu: Compute) -> Iterator[Step]:
    """Run the reference on moved inputs; its results are moved, too, as they are rounded."""
    for seed in range(DRAWS):
        moved = {name: tensor.clone() for name, tensor in inputs.items()}
        nudge(moved, lambda name: inputs[name].dtype, seed)
        yield nudged(cpu(moved), seed)


def nudged(step: Step, seed: int) -> Step:
    """Move what a step returns to neighbouring numbers."""
    loss, found = step
    made = {name: tensor.detach().clone() for name, tensor in found.items()}
    nudge(made, lambda name: made[name].dtype, seed)
    return loss, made


def beyond(expected: Step, draws: Iterator[Step], step: Step) -> float:
    """Return the largest excess over the bounds that the draws give."""
    loss, found = step
    on_cpu = {name: tensor.detach().cpu() for name, tensor in found.items()}
    return max(deviation.excess for deviation in Rounding(expected, draws).deviations((loss, on_cpu)).values())


def differentiated(compute: Callable[[Tensors], Tensors], has_backward: bool = True) -> Compute:
    """Return outputs of ``compute``, and the gradients of their sum, weighted at random, with respect to its inputs."""

    def run(inputs: Tensors) -> Step:
        leaves = {name: tensor.detach().clone().requires_grad_(has_backward) for name, tensor in inputs.items()}
        outputs = compute(leaves)
        draw = torch.Generator().manual_seed(9)
        weights = {n: torch.randn(x.shape, generator=draw).bfloat16().to(x) for n, x in outputs.items()}
        total = torch.stack([(x.double() * weights[name].double()).sum() for name, x in outputs.items()]).sum()
        made = {name: x.detach() for name, x in outputs.items()}
        if has_backward:
            grads = torch.autograd.grad(total, list(leaves.values()))
            made |= {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
        return float(total.detach()), made

    return run
