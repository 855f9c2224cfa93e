"""Memory and time of the loss inside the head against the plain loss, forward and backward.

One batch, fp32, one thread: 4096 tokens, 150,000 classes, hidden size 512, every label valid, gradients of hidden
states and weight. ``plain`` is what transformers does: all logits, then ``F.cross_entropy``. Both sides take turns in
one process for the time. Peak memory is that of a process of its own per side: its peak resident size over what was
resident before the loss, which both sides need (hidden states, weight); the gradients count. Linux only.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from harness import Result, in_turn, parser, report, start
from torch import Tensor

from omnitrain.ops.loss.cross_entropy import linear_cross_entropy

FORMULA = (
    "memory_ratio = chunked / plain peak resident memory added by forward and backward; "
    "time_ratio = median over rounds of (chunked / plain seconds)"
)
Batch = tuple[Tensor, Tensor, Tensor]
Draw = Callable[[Namespace], Sequence[Tensor]]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute the plain loss with all logits at once."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute omnitrain's loss."""
    return linear_cross_entropy(hidden, weight, labels).sum


def batch(sizes: Namespace) -> Batch:
    """Draw hidden states, weight and labels."""
    torch.manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.hidden, requires_grad=True)
    weight = torch.randn(sizes.classes, sizes.hidden).mul_(0.02).requires_grad_()
    return hidden, weight, torch.randint(sizes.classes, (sizes.tokens,))


def run(side: Callable[..., Tensor], tensors: Sequence[Tensor]) -> float:
    """Compute loss and gradients; return the mean loss. ``tensors``: hidden states, weight, ..."""
    tensors[0].grad = tensors[1].grad = None
    loss = side(*tensors) / len(tensors[0])
    loss.backward()
    return loss.item()


def peak_bytes(side: Callable[..., Tensor], draw: Draw, sizes: Namespace) -> float:
    """Return the peak of resident memory that ``side`` adds, in a separate process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_peak_of_this_process, (side, draw, sizes))


def _peak_of_this_process(side: Callable[..., Tensor], draw: Draw, sizes: Namespace) -> float:
    run(side, draw(Namespace(tokens=8, classes=64, hidden=64)))  # the workspaces of libraries are not the loss's
    tensors = draw(sizes)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from what is resident now
    before = _peak()
    run(side, tensors)
    return _peak() - before


def _peak() -> float:
    """Return the kernel's peak memory of this process (``ru_maxrss`` starts from the parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def compare(
    name: str, sides: Mapping[str, Callable[..., Tensor]], draw: Draw, sizes: Namespace, rtol: float = 1e-6
) -> Result:
    """Measure memory once per side, ``chunked`` and ``plain``, and time in turns, on tensors of ``draw(sizes)``."""
    peaks = {side: peak_bytes(of_side, draw, sizes) for side, of_side in sides.items()}
    tensors = draw(sizes)
    losses = {side: run(of_side, tensors) for side, of_side in sides.items()}  # a round that does not count
    torch.testing.assert_close(losses["chunked"], losses["plain"], rtol=rtol, atol=0)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for index in range(sizes.rounds):
        for side in in_turn(tuple(sides), index):
            begin = time.perf_counter()
            for _ in range(sizes.steps):
                run(sides[side], tensors)
            seconds[side].append((time.perf_counter() - begin) / sizes.steps)
    ratios = [ours / theirs for ours, theirs in zip(seconds["chunked"], seconds["plain"], strict=True)]
    return Result(
        name=name,
        formula=FORMULA,
        figures={
            "memory_ratio": peaks["chunked"] / peaks["plain"],
            "time_ratio": median(ratios),
            **{f"{side}_peak_mib": peak / 2**20 for side, peak in peaks.items()},
            **{f"{side}_seconds": median(values) for side, values in seconds.items()},
            **{size: float(getattr(sizes, size)) for size in ("tokens", "classes", "hidden")},
        },
        rounds={**{f"{side}_seconds": values for side, values in seconds.items()}, "time_ratio": ratios},
    )


def options_of(description: str, tokens: int, rounds: int) -> Namespace:
    """Parse the command line."""
    options = parser(description, rounds=rounds, steps=1)
    options.add_argument("--tokens", type=int, default=tokens)
    options.add_argument("--classes", type=int, default=150_000)
    options.add_argument("--hidden", type=int, default=512)
    return start(options)


def main() -> None:
    """Measure and report."""
    given = options_of(sys.modules[__name__].__doc__ or "", tokens=4096, rounds=7)
    report(compare("loss", {"chunked": chunked, "plain": plain}, batch, given), given.json)


if __name__ == "__main__":
    main()
