"""The attention entry point against transformers' sdpa, forward and backward, in fp32 on one thread.

- Unpacked: ``entry`` is omnitrain's function for a row without offsets, ``sdpa`` is the one of transformers that it
  ends in. The row is short, so that what the entry adds would show.
- Packed: samples of long-tailed (log-normal) lengths fill a row. ``packed`` makes the mask spec and attends by it, with
  the backend that ``auto`` chooses; ``block_diagonal`` is one call of ``F.scaled_dot_product_attention`` with the
  boolean mask of the same row, which is ready before its clock starts. The first round compares their outputs and
  gradients.

A round is ``--steps`` repetitions, in which the sides take turns; each round draws other lengths.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, median

import numpy as np
import torch
import torch.nn.functional as F
from harness import Result, in_turn, parser, report, start
from transformers import AttentionInterface, LlamaConfig
from transformers.masking_utils import create_causal_mask

from omnitrain.ops.attention.entry import CHOSEN
from omnitrain.ops.attention.install import ATTENTION_NAME
from omnitrain.ops.attention.packed_context import packed

FORMULA = (
    "unpacked_ratio = median over rounds of (entry seconds / sdpa seconds); "
    "packed_speedup = median over rounds of (block_diagonal seconds / packed seconds)"
)
HEADS, KEY_HEADS, HEAD_DIM = 8, 4, 64
MEDIAN_LENGTH, SPREAD = 96, 1.0  # of the log-normal lengths: their median, and the deviation of their logarithm


class Layer(torch.nn.Module):
    """The attributes of an attention layer that attention functions read."""

    is_causal = True
    num_key_value_groups = HEADS // KEY_HEADS


def draw_states(tokens: int) -> list[torch.Tensor]:
    """Draw query, key and value ``[1, heads, tokens, head_dim]``."""
    return [torch.randn(1, heads, tokens, HEAD_DIM, requires_grad=True) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]


def draw_offsets(tokens: int, seed: int) -> tuple[int, ...]:
    """Draw the offsets of a row of ``tokens``, with samples sorted by length as in packs."""
    generator = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = max(1, round(generator.lognormal(np.log(MEDIAN_LENGTH), SPREAD)))
        lengths.append(min(drawn, tokens - sum(lengths)))
    return (0, *np.cumsum(sorted(lengths)).tolist())


def block_diagonal(offsets: tuple[int, ...]) -> torch.Tensor:
    """Return a mask ``[1, 1, T, T]``, causal within each sample."""
    parts = [torch.ones(stop - start, stop - start, dtype=torch.bool).tril() for start, stop in pairwise(offsets)]
    return torch.block_diag(*parts)[None, None]


def seconds(side: Callable[[], torch.Tensor], states: list[torch.Tensor], gradient: torch.Tensor) -> float:
    """Return the seconds of one forward and backward."""
    began = time.perf_counter()
    torch.autograd.grad(side(), states, gradient)
    return time.perf_counter() - began


def round_of(
    sides: dict[str, Callable[[], torch.Tensor]], states: list[torch.Tensor], steps: int, index: int
) -> dict[str, float]:
    """Return the seconds per repetition of each side, after one warm-up."""
    gradient = torch.randn(1, states[0].size(2), HEADS, HEAD_DIM)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(steps + 1):
        for name in in_turn(tuple(sides), index + step):
            taken[name].append(seconds(sides[name], states, gradient))
    return {name: fmean(values[1:]) for name, values in taken.items()}


def unpacked_sides(states: list[torch.Tensor]) -> dict[str, Callable[[], torch.Tensor]]:
    """The entry point and transformers' sdpa over one row."""
    layer, entry = Layer(), AttentionInterface._global_mapping[ATTENTION_NAME]
    sdpa = AttentionInterface._global_mapping["sdpa"]
    return {
        "entry": lambda: entry(layer, *states, None, scaling=HEAD_DIM**-0.5, dropout=0.0)[0],
        "sdpa": lambda: sdpa(layer, *states, None, scaling=HEAD_DIM**-0.5, dropout=0.0)[0],
    }


def packed_sides(states: list[torch.Tensor], offsets: tuple[int, ...]) -> dict[str, Callable[[], torch.Tensor]]:
    """The entry point and one masked call over the same packed sequence."""
    layer, entry, mask = Layer(), AttentionInterface._global_mapping[ATTENTION_NAME], block_diagonal(offsets)
    config, embeds = LlamaConfig(), torch.empty(1, offsets[-1], 1)
    config._attn_implementation = ATTENTION_NAME

    def ours() -> torch.Tensor:
        with packed(offsets):
            return entry(layer, *states, create_causal_mask(config, embeds, None, None))[0]

    def masked() -> torch.Tensor:
        return F.scaled_dot_product_attention(*states, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    return {"packed": ours, "block_diagonal": masked}


def assert_equal(sides: dict[str, Callable[[], torch.Tensor]], states: list[torch.Tensor]) -> None:
    """Check that both sides give the same outputs and gradients."""
    outputs = [side() for side in sides.values()]
    gradients = [torch.autograd.grad(output, states, torch.ones_like(output)) for output in outputs]
    for one, other in zip(*([output, *grads] for output, grads in zip(outputs, gradients, strict=True)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def measure(rounds: int, steps: int, row: int, tokens: int) -> Result:
    """Measure all sides in turn."""
    torch.manual_seed(0)
    short, long = draw_states(row), draw_states(tokens)
    taken: list[dict[str, float]] = []
    samples = []
    for index in range(rounds):
        offsets = draw_offsets(tokens, seed=index)
        samples.append(len(offsets) - 1)
        sides = packed_sides(long, offsets)
        if index == 0:
            assert_equal(sides, long)
        # A short row takes no time beside a long one: as many more repetitions.
        more = steps * max(1, tokens // row)
        taken.append(round_of(unpacked_sides(short), short, more, index) | round_of(sides, long, steps, index))
    ratios = [values["entry"] / values["sdpa"] for values in taken]
    speedups = [values["block_diagonal"] / values["packed"] for values in taken]
    return Result(
        name="attention",
        formula=FORMULA,
        figures={
            "unpacked_ratio": median(ratios),
            "packed_speedup": median(speedups),
            **{f"{name}_milliseconds": 1e3 * median(values[name] for values in taken) for name in taken[0]},
            "samples_per_row": fmean(samples),
        },
        rounds={
            **{name: [values[name] for values in taken] for name in taken[0]},
            "unpacked_ratio": ratios,
            "packed_speedup": speedups,
        },
    )


def main() -> None:
    """Measure and report."""
    options = parser(sys.modules[__name__].__doc__ or "", rounds=7, steps=5)
    options.add_argument("--row", type=int, default=256, help="tokens of the unpacked sequence")
    options.add_argument("--tokens", type=int, default=4096, help="tokens of the packed sequence")
    given = start(options)
    report(measure(given.rounds, given.steps, given.row, given.tokens), given.json)
    print(f"  chosen for packed sequences: {', '.join(sorted({used.name for used in CHOSEN.values()}))}")


if __name__ == "__main__":
    main()
