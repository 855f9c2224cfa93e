"""Optimizer state in host memory: the same updates, wherever it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from omnitrain.optim.build import build_optimizer
from omnitrain.optim.offload import OffloadedOptimizer
from omnitrain.recipe import Optimizer

ADAMW = partial(torch.optim.AdamW, lr=0.01, fused=True)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def train(trained: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        trained(inputs.to(trained[0].weight.dtype)).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()


def offloading(trained: nn.Module, parameters: list[nn.Parameter]) -> OffloadedOptimizer:
    return OffloadedOptimizer(ADAMW, [{"params": list(trained.parameters())}], parameters)


@pytest.mark.parametrize("share", ["all", "some"])
def test_updates_are_those_of_the_optimizer_without_offload(share: str) -> None:
    plain, other = model(), model()
    offloaded = list(other.parameters()) if share == "all" else list(other[0].parameters())
    train(plain, ADAMW(plain.parameters()), range(4))
    train(other, offloading(other, offloaded), range(4))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))


def test_state_and_copy_are_not_where_the_parameter_is() -> None:
    trained = model()
    optimizer = offloading(trained, list(trained[0].parameters()))
    train(trained, optimizer, range(1))
    stand_ins = optimizer.inner.param_groups[0]["params"]
    own = list(trained.parameters())
    assert [a is b for a, b in zip(stand_ins, own, strict=True)] == [False, False, True, True]
    assert all(optimizer.state[a] is optimizer.inner.state[b] for a, b in zip(own, stand_ins, strict=True))
    assert stand_ins[0].data_ptr() != own[0].data_ptr() and torch.equal(stand_ins[0], own[0])


@pytest.mark.parametrize("turn", ["plain to offload", "offload to plain"])
def test_a_run_goes_on_with_offload_switched_on_or_off(turn: str) -> None:
    straight, resumed = model(), model()
    train(straight, ADAMW(straight.parameters()), range(4))
    makers = [lambda m: ADAMW(m.parameters()), lambda m: offloading(m, list(m.parameters()))]
    first, second = makers if turn == "plain to offload" else makers[::-1]
    before: Any = first(resumed)
    train(resumed, before, range(2))
    after: Any = second(resumed)
    after.load_state_dict(before.state_dict())
    train(resumed, after, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_weights_loaded_after_the_optimizer_was_built_are_the_ones_that_are_updated() -> None:
    trained, source = model(), model()
    optimizer = offloading(trained, list(trained.parameters()))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    trained.load_state_dict(source.state_dict())
    train(source, ADAMW(source.parameters()), range(1))
    train(trained, optimizer, range(1))
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), source.parameters(), strict=True))


def test_low_precision_weights_near_one_all_move_at_a_small_learning_rate() -> None:
    weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    owner = nn.Module()
    owner.weight = weight
    settings = Optimizer(learning_rate=1e-5, weight_decay=0.0, warmup_steps=0)
    optimizer = build_optimizer(owner, settings, offloaded=[weight])
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    master = optimizer.state_dict()["masters"][0]
    rounding = 100 * 2**-25  # half a step of fp32 below 1, each time
    assert master.dtype == torch.float32 and (master - (1 - 100 * 1e-5)).abs().max() <= rounding
    for _ in range(300):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (weight < 1).all()  # 400 steps of 1e-5 are one step of bf16 below 1


def test_a_resumed_run_keeps_what_low_precision_weights_round_away() -> None:
    straight, resumed = model(torch.bfloat16), model(torch.bfloat16)
    train(straight, offloading(straight, list(straight.parameters())), range(4))
    before = offloading(resumed, list(resumed.parameters()))
    train(resumed, before, range(2))
    after = offloading(resumed, list(resumed.parameters()))
    after.load_state_dict(before.state_dict())
    train(resumed, after, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
