"""Experts of one layer on one rank: the cost of more experts, and the layer against transformers' ``grouped_mm``.

- Dispatch and combine alone (sort by expert, a row per token and expert, weighted sum), forward and backward, with 8,
  64 and 512 experts. The work is that of the rows, whose number does not change.
- The whole layer, forward and backward, through transformers' registry: ``omnitrain`` and ``grouped_mm`` take turns.
  The first round compares their outputs and gradients.

fp32 on one thread; every token goes to eight experts drawn at random.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from harness import Result, in_turn, parser, report, start
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import omnitrain.ops.experts.install  # noqa: F401  registers experts "omnitrain"
from omnitrain.ops.experts.permute import combine_rows, sort_by_expert, take_rows

FORMULA = (
    "dispatch_growth = median over rounds of (dispatch + combine seconds with 512 experts / with 8); "
    "layer_speedup_E = median over rounds of (grouped_mm seconds / omnitrain seconds) of the layer with E experts"
)
EXPERTS, TOP_K = (8, 64, 512), 8
SIDES = ("omnitrain", "grouped_mm")


def draw_routes(tokens: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw experts ``[T, k]`` and weights of every token."""
    index = torch.rand(tokens, num_experts).topk(min(TOP_K, num_experts), dim=-1)[1]
    return index, torch.rand(index.shape, requires_grad=True)


def draw_layer(num_experts: int, hidden: int, inner: int) -> Any:
    """The experts of a Qwen3-MoE layer."""
    config = Qwen3MoeConfig(num_experts=num_experts, hidden_size=hidden, moe_intermediate_size=inner)
    layer = Qwen3MoeExperts(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return layer


def seconds(forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor], gradient: torch.Tensor) -> float:
    """Return the seconds of one forward and backward."""
    began = time.perf_counter()
    torch.autograd.grad(forward(), inputs, gradient)
    return time.perf_counter() - began


def dispatch_and_combine(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, number: int) -> torch.Tensor:
    """A layer whose experts return their input."""
    routes = sort_by_expert(index, number)
    return combine_rows(take_rows(hidden, routes), weights, routes)


def measure(rounds: int, tokens: int, width: int, inner: int) -> Result:
    """Measure all sides in turn."""
    torch.manual_seed(0)
    hidden, gradient = torch.randn(tokens, width, requires_grad=True), torch.randn(tokens, width)
    routed = {number: draw_routes(tokens, number) for number in EXPERTS}
    layers = {number: draw_layer(number, width, inner) for number in EXPERTS}

    def alone(number: int) -> float:
        index, weights = routed[number]
        return seconds(lambda: dispatch_and_combine(hidden, index, weights, number), [hidden, weights], gradient)

    def layer(side: str, number: int) -> float:
        index, weights = routed[number]
        experts = layers[number]
        experts.config._experts_implementation = side
        return seconds(lambda: experts(hidden, index, weights), [hidden, weights, *experts.parameters()], gradient)

    assert_equal(layers[EXPERTS[0]], hidden, *routed[EXPERTS[0]])
    taken: dict[str, list[float]] = {}
    for index in range(-1, rounds):  # the first one does not count
        order = EXPERTS[::-1] if index % 2 else EXPERTS
        values = {f"dispatch_{number}": alone(number) for number in order}
        values |= {f"{side}_{number}": layer(side, number) for number in order for side in in_turn(SIDES, index)}
        if index >= 0:
            for name, value in values.items():
                taken.setdefault(name, []).append(value)

    def ratio(one: str, other: str) -> float:
        return median(a / b for a, b in zip(taken[one], taken[other], strict=True))

    figures = {"dispatch_growth": ratio("dispatch_512", "dispatch_8")}
    figures |= {f"layer_speedup_{number}": ratio(f"grouped_mm_{number}", f"omnitrain_{number}") for number in EXPERTS}
    figures |= {f"dispatch_{number}_ms": 1e3 * median(taken[f"dispatch_{number}"]) for number in EXPERTS}
    figures |= {f"layer_{number}_ms": 1e3 * median(taken[f"omnitrain_{number}"]) for number in EXPERTS}
    sizes = {"tokens": tokens, "top_k": TOP_K, "hidden": width, "inner": inner}
    return Result("moe_dispatch", FORMULA, figures | {name: float(size) for name, size in sizes.items()}, taken)


def assert_equal(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
    """Check that both sides give the same outputs and gradients."""
    found = []
    for side in SIDES:
        experts.config._experts_implementation = side
        output = experts(hidden, index, weights)
        inputs = [hidden, weights, *experts.parameters()]
        found.append([output, *torch.autograd.grad(output, inputs, torch.ones_like(output))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * float(other.detach().abs().max()), rtol=1e-4)


def main() -> None:
    """Measure and report."""
    options = parser(sys.modules[__name__].__doc__ or "", rounds=7, steps=1)
    options.add_argument("--tokens", type=int, default=16384, help="of the layer")
    options.add_argument("--hidden", type=int, default=256, help="width of a token")
    options.add_argument("--inner", type=int, default=128, help="width inside an expert")
    given = start(options)
    report(measure(given.rounds, given.tokens, given.hidden, given.inner), given.json)


if __name__ == "__main__":
    main()
