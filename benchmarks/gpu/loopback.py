"""The experts' exchange on one rank that sends to itself, as late as it may: what reads too early reads NaN.

The code is that of many ranks; only the link is another one. Rows arrive when they are awaited, not a moment before,
and are overwritten once they were sent:

- on a GPU they are copied by a stream of their own, which first sleeps; the waiting stream waits for it, not the host;
- on a CPU they are copied by the wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from omnitrain.ops.experts.install import set_experts, use_omnitrain_experts
from omnitrain.ops.experts.weights import experts_in
from omnitrain.parallel.expert.dispatch import Link, RankDispatcher

EXPERTS, TOP_K, HIDDEN, INNER, MOST_TOKENS = 8, 2, 64, 32, 300
LONGEST_SLEEP = 200_000  # clock cycles of a GPU: some 0.1 ms, in which a step does all that it may do too early


class PromptLoopback:
    """A link of a rank to itself that sends immediately."""

    rank, size = 0, 1

    def start(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Callable[[], Any]:
        """See :class:`omnitrain.parallel.expert.dispatch.Link`."""
        out.copy_(rows)
        return lambda: None

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """See :class:`omnitrain.parallel.expert.dispatch.Link`."""
        return counts


class LateLoopback(PromptLoopback):
    """The same link, which sends as late as allowed; see the top of this file."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._random = random.Random(seed)

    def start(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Callable[[], Any]:
        """Return a wait function that keeps both tensors alive, as a link must."""
        out.fill_(torch.nan)
        if self._stream is None:

            def arrive() -> None:
                out.copy_(rows)
                rows.fill_(torch.nan)

            return arrive
        self._stream.wait_stream(torch.cuda.current_stream(out.device))
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._random.randrange(LONGEST_SLEEP))
            out.copy_(rows)
            there = self._stream.record_event()

        def wait() -> None:
            there.wait()  # the stream that asks, not the host
            rows.fill_(torch.nan)

        return wait


def over(link: Link, chunks: int, model: nn.Module) -> None:
    """Let all experts of ``model`` exchange their rows over ``link``, in chunks."""
    for _, experts in experts_in(model):
        set_experts(experts, dispatcher=RankDispatcher(link, chunks))


def experts_of_a_layer(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return random experts of a small Qwen3-MoE."""
    config = Qwen3MoeConfig(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INNER)
    experts = Qwen3MoeExperts(config).to(device, dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    use_omnitrain_experts(experts)
    return experts


def check_late_rows(device: torch.device, dtype: torch.dtype, steps: int) -> None:
    """Random steps over a late link and over a prompt one have the same bits, outputs and gradients.

    Tokens, routes, chunks and micro-batches in flight differ from step to step; some experts get nothing.

    Raises:
        AssertionError: with the number of the step.
    """
    torch.manual_seed(0)
    drawn = random.Random(0)
    experts = experts_of_a_layer(device, dtype)
    late, prompt = LateLoopback(device), PromptLoopback()
    for step in range(steps):
        chunks, used, flights = drawn.randint(1, EXPERTS), drawn.randint(TOP_K, EXPERTS), drawn.randint(1, 3)
        inputs = [_inputs(drawn.randint(1, MOST_TOKENS), used, device, dtype) for _ in range(flights)]
        delays = drawn.random() < 0.5
        found, expected = (_step(experts, link, chunks, delays, inputs) for link in (late, prompt))
        for one, other in zip(found, expected, strict=True):
            assert not one.isnan().any(), f"step {step}: NaN; a row was read before it was there, or after it was sent"
            assert torch.equal(one, other), f"step {step}: other bits than over a link that sends at once"
        of_experts = found[-len(list(experts.parameters())) :]
        idle = sum(gradient[used:].count_nonzero().item() for gradient in of_experts)
        assert idle == 0, f"step {step}: experts without a token have {idle} gradients that are not zero"


def _inputs(tokens: int, used: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one micro-batch: hidden states, experts among the first ``used``, weights."""
    index = torch.rand(tokens, used, device=device).topk(TOP_K, dim=-1).indices
    return torch.randn(tokens, HIDDEN, device=device, dtype=dtype), index, torch.rand(index.shape, device=device)


def _step(
    experts: nn.Module, link: Link, chunks: int, delays: bool, inputs: list[tuple[Tensor, Tensor, Tensor]]
) -> list[Tensor]:
    """Run the forwards of all micro-batches, then their backwards in reverse order."""
    set_experts(experts, dispatcher=RankDispatcher(link, chunks), delays_weight_gradients=delays)
    experts.zero_grad()
    leaves = [(hidden.clone().requires_grad_(), weights.clone().requires_grad_()) for hidden, _, weights in inputs]
    outputs = [experts(hidden, index, weights) for (hidden, weights), (_, index, _) in zip(leaves, inputs, strict=True)]
    for output in reversed(outputs):
        output.square().sum().backward()
    gradients = [tensor.grad for pair in leaves for tensor in pair] + [p.grad for p in experts.parameters()]
    return [*outputs, *(gradient for gradient in gradients if gradient is not None)]
