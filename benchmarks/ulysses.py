"""Ulysses on a slow network: bytes against the formula, and how much communication async Ulysses hides.

Two ranks share a sequence and run one attention layer of transformers' Qwen3, forward and backward, in fp32 with one
thread per rank. The ranks run in their own network namespace, each on its own core. ``tc`` limits the loopback, so that
communication takes time but almost no CPU. The benchmark first times the projections, and then chooses the rate with
which the all-to-alls of a forward should take as long. This needs root and iproute2. Without them, or with
``--rate=0``, the loopback runs at full speed, and there is almost no communication to hide.

The sides take turns on the same ranks:

- ``plain``: Ulysses without overlap: projections, all-to-all, attention, all-to-all, projection;
- ``async``: the same layer with ``async_ulysses``; its outputs and gradients must have the same bits;
- ``communication``: only the all-to-alls of ``plain``, forward and backward;
- ``projections``: only the forward of the layer's projections, over the rank's tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Result, in_turn, parser, report, settle, start
from slow_link import bytes_on_the_wire, joined_ranks, limit, may_limit, run_ranks, seconds
from torch import Tensor, nn
from transformers import AutoConfig

from omnitrain.models.components.contract import Contract
from omnitrain.models.hf.load import foundation_class
from omnitrain.ops.attention.install import use_omnitrain_attention
from omnitrain.ops.attention.spec import MaskSpec
from omnitrain.parallel.sequence.async_ulysses.attention import AttentionLayout, use_async_ulysses
from omnitrain.parallel.sequence.async_ulysses.check import attention_layouts, kind_of
from omnitrain.parallel.sequence.head_exchange import equal_spans, heads_to_tokens, tokens_to_heads
from omnitrain.parallel.sequence.ulysses import UlyssesShard
from omnitrain.parallel.state import init_parallel_state
from omnitrain.plan.sequence import split_sequence

FORMULA = (
    "hidden_share = median over rounds of ((plain - async) / communication seconds); "
    "bytes_ratio = bytes sent per rank and layer in a forward / (4 T H itemsize (sp - 1) / sp^2)"
)
RANKS, HEAD_DIM, ITEMSIZE = 2, 64, 4


class Layer:
    """The attention of a layer, on this rank's slice of a sequence."""

    def __init__(self, tokens: int, hidden: int) -> None:
        state = init_parallel_state(ulysses_size=RANKS)
        split = split_sequence(tokens, sp=RANKS)
        self.shard = UlyssesShard(split, state.sp_group, state.cp_group)
        self.rows = torch.from_numpy(split.positions[dist.get_rank()])
        self.heads, self.tokens, self.hidden_size = hidden // HEAD_DIM, tokens, hidden
        torch.manual_seed(0)
        model: Any = foundation_class(self.config)(self.config)
        use_omnitrain_attention(model)
        self.model, self.attention = model, model.model.layers[0].self_attn
        self.hidden = torch.randn(1, tokens, hidden)[:, self.rows].requires_grad_()
        self.tables = model.model.rotary_emb(self.hidden, self.rows[None])
        self.spec = MaskSpec((0, tokens), causal=True)

    @property
    def config(self) -> Any:
        """Of a Qwen3 as wide as the layer."""
        return AutoConfig.for_model(
            "qwen3",
            vocab_size=64,
            hidden_size=self.hidden_size,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            head_dim=HEAD_DIM,
        )

    @property
    def formula_bytes(self) -> float:
        """Per rank, of a forward."""
        return 4 * self.tokens * self.hidden_size * ITEMSIZE * (RANKS - 1) / RANKS**2

    def forward(self) -> Tensor:
        """Each forward has a mask of its own, as each micro-batch has."""
        mask = self.spec.on(UlyssesShard(self.shard.split, self.shard.sp_group, self.shard.cp_group))
        return self.attention(self.hidden, position_embeddings=self.tables, attention_mask=mask)[0]

    def step(self) -> list[Tensor]:
        """Return the output and gradients."""
        output = self.forward()
        return [output, *torch.autograd.grad(output, [self.hidden, *self.attention.parameters()], output.detach())]

    def communicate(self) -> None:
        """The all-to-alls of a step."""
        own = torch.zeros(len(self.rows), self.heads, HEAD_DIM, requires_grad=True)
        spans, rows = equal_spans(self.heads, RANKS), self.shard.lengths_of_ranks
        for_attention = tokens_to_heads([own] * 3, [spans] * 3, rows, self.shard.sp_group)
        (output,) = heads_to_tokens([for_attention[0]], [spans], rows, self.shard.sp_group)
        torch.autograd.grad(output, own, output.detach())

    def project(self) -> None:
        """The projections of a forward."""
        with torch.no_grad():
            for part in self.attention.children():
                if isinstance(part, nn.Linear):
                    part(self.hidden)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count the bytes that this rank passes to all-to-alls, including those it keeps."""
    sent: list[int] = []
    plain = dist.all_to_all_single
    dist.all_to_all_single = lambda out, rows, *more, **given: (
        sent.append(rows.nbytes) or plain(out, rows, *more, **given)
    )
    try:
        yield sent
    finally:
        dist.all_to_all_single = plain


def run_rank(tokens: int, hidden: int, rounds: int, steps: int, rate: float | None) -> dict[str, Any]:
    """Measure on one rank."""
    settle()
    layer, overlapped = Layer(tokens, hidden), Layer(tokens, hidden)
    layout = attention_layouts(overlapped.model, Contract())[kind_of(overlapped.attention)]
    assert isinstance(layout, AttentionLayout), layout
    use_async_ulysses(overlapped.attention, layout)
    layer.project()
    projections = median(seconds(layer.project, steps) for _ in range(5))
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, projections)
    if rate is None:
        rate = 8 * RANKS * layer.formula_bytes / max(everyone)
    if rate and dist.get_rank() == 0:
        limit(rate)
    with counted_bytes() as sent:
        layer.forward()
    dist.barrier()
    before = bytes_on_the_wire()
    dist.barrier()
    for one, other in zip(layer.step(), overlapped.step(), strict=True):
        assert torch.equal(one, other)
    dist.barrier()
    wire = bytes_on_the_wire() - before
    sides: dict[str, Callable[[], Any]] = {
        "plain": layer.step,
        "async": overlapped.step,
        "communication": layer.communicate,
        "projections": layer.project,
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds):
        for name in in_turn(tuple(sides), index):
            taken[name].append(seconds(sides[name], steps))
    return {
        "rounds": taken,
        "bytes_ratio": sum(sent) * (RANKS - 1) / RANKS / layer.formula_bytes,
        "wire_ratio": wire / (2 * 2 * RANKS * layer.formula_bytes),  # two sides, forward and backward
        "megabits_per_second": rate / 1e6,
    }


def main() -> None:
    """See the top of this file."""
    options = parser(__doc__ or "", rounds=7, steps=1)
    options.add_argument("--tokens", type=int, default=1024, help="of the row")
    options.add_argument("--hidden", type=int, default=2048, help="width")
    options.add_argument("--rate", type=float, help="Mbit/s of all ranks together; 0: not limited")
    options.add_argument("--as-rank", action="store_true", help="be one of the ranks")
    given = start(options)
    rate = None if given.rate is None else 1e6 * given.rate
    if given.as_rank:
        with joined_ranks():
            print(json.dumps(run_rank(given.tokens, given.hidden, given.rounds, given.steps, rate)))
        return
    names = ("tokens", "hidden", "rounds", "steps", "rate")
    arguments = [f"--{name}={value}" for name in names if (value := getattr(given, name)) is not None]
    is_limited = rate != 0 and may_limit()
    if rate != 0 and not is_limited:
        print("cannot limit the loopback (this needs root and iproute2), so it runs at full speed")
        arguments.append("--rate=0")
    found = run_ranks(__file__, arguments, ranks=RANKS, is_limited=is_limited)
    rounds = found["rounds"]
    per_round = [dict(zip(rounds, values, strict=True)) for values in zip(*rounds.values(), strict=True)]
    figures = {
        "hidden_share": median((one["plain"] - one["async"]) / one["communication"] for one in per_round),
        "bytes_ratio": found["bytes_ratio"],
        "wire_ratio": found["wire_ratio"],
        "megabits_per_second": found["megabits_per_second"],
        "tokens": float(given.tokens),
        **{f"{name}_seconds": median(values) for name, values in rounds.items()},
        "communication_to_projections": median(one["communication"] / (2 * one["projections"]) for one in per_round),
    }
    report(Result("ulysses", FORMULA, figures, rounds), given.json)


if __name__ == "__main__":
    main()
