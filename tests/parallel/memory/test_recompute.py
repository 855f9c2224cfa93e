"""A recomputation gives the results of the forward."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from omnitrain.ops.experts.install import use_omnitrain_experts
from omnitrain.ops.experts.weights import experts_in
from omnitrain.parallel.memory.recompute import attention_modules, recompute_blocks, recompute_modules
from tests.parallel import factories

NOISE = 1e-6  # of a router's weights, as between two kernels that add in another order


def near_ties() -> Any:
    """All experts have nearly the same score, and compute something else."""
    model = factories.qwen3_moe().train()
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight
        weight.data[1:] = weight.data[:1] + 1e-8 * torch.randn(weight[1:].shape)
    use_omnitrain_experts(model)
    return model


def make_noisy(model: nn.Module) -> None:
    """Routers round otherwise when they are called again."""
    for layer in model.model.layers:
        gate = layer.mlp.gate
        noises = iter([torch.zeros_like(gate.weight), NOISE * torch.randn(gate.weight.shape)])
        gate.forward = partial(_noisy, gate, type(gate).forward, noises)


def _noisy(gate: nn.Module, plain: Any, noises: Iterator[torch.Tensor], hidden: torch.Tensor) -> Any:
    noise = next(noises)
    own, gate.forward = gate.forward, partial(plain, gate)
    try:
        return functional_call(gate, {"weight": gate.weight + noise}, (hidden,))
    finally:
        gate.forward = own


def trained(model: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients, and tokens whose experts were others in the recompute."""
    chosen: list[torch.Tensor] = []
    for _, experts in experts_in(model):
        experts.register_forward_pre_hook(lambda module, arguments: chosen.append(arguments[1].sort(-1)[0]))
    ids = torch.randint(3, 180, (1, 64), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    layers = len(chosen) // 2
    flips = sum(int((a != b).any(-1).sum()) for a, b in zip(chosen[:layers], chosen[layers:][::-1], strict=False))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, flips


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[n] - g).abs().max() / g.abs().max().clamp(min=1e-12)) for n, g in expected.items())


@pytest.mark.parametrize("saved_ops", [None, ["aten.mm"]])
def test_rounding_in_a_recompute_flips_no_expert(saved_ops: list[str] | None) -> None:
    torch.manual_seed(0)
    model = near_ties()
    state = model.state_dict()
    expected, _ = trained(model)

    def again(noise: bool) -> Any:
        other = near_ties()
        other.load_state_dict(state)
        if noise:
            make_noisy(other)
        return other

    untaped = again(noise=True)
    untaped.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    gradients, flips = trained(untaped)
    assert flips > 5 and worst(gradients, expected) > 0.01

    exact = again(noise=False)
    recompute_blocks(exact.model.layers, saved_ops)
    assert worst(trained(exact)[0], expected) == 0

    taped = again(noise=True)
    recompute_blocks(taped.model.layers, saved_ops)
    gradients, flips = trained(taped)
    assert flips == 0 and worst(gradients, expected) < 100 * NOISE


def test_a_graph_is_recomputed_as_often_as_it_is_differentiated() -> None:
    model = factories.qwen3_moe().train()
    use_omnitrain_experts(model)
    recompute_blocks(model.model.layers)
    loss = model(input_ids=torch.arange(3, 35)[None], use_cache=False).logits.square().mean()
    weights = list(model.parameters())
    first, second = (torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and float(first[0].abs().max()) > 0


def test_torch_sees_the_device_of_what_is_called_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It restores random numbers of the devices of positional arguments; here it is asked which it looks at."""
    model = factories.qwen3_moe().train()
    recompute_modules(part for layer in model.model.layers for part in attention_modules(layer))
    seen: list[bool] = []
    look = torch.utils.checkpoint._infer_device_type

    def note(*arguments: Any) -> str:
        seen.append(any(isinstance(argument, torch.Tensor) for argument in arguments))
        return look(*arguments)

    monkeypatch.setattr(torch.utils.checkpoint, "_infer_device_type", note)
    plain = trained(factories.qwen3_moe().train())[0]
    assert worst(trained(model)[0], plain) == 0
    assert seen and all(seen)


@pytest.mark.slow  # a process of its own imports everything
def test_attention_of_a_gpu_is_among_the_ops_that_are_kept_before_it_was_first_called() -> None:
    ask = "from omnitrain.parallel.memory.recompute import find_op; print(find_op('torch_attn._varlen_attn'))"
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "torch_attn._varlen_attn"
