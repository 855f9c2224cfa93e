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
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from harness import Result, in_turn, parser, report, start

from omnitrain.ops.loss.cross_entropy import linear_cross_entropy

FORMULA = (
    "memory_ratio = chunked / plain peak resident memory added by forward and backward; "
    "time_ratio = median over rounds of (chunked / plain seconds)"
)
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the plain loss with all logits at once."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def chunked(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute omnitrain's loss."""
    return linear_cross_entropy(hidden, weight, labels).sum


SIDES: dict[str, Callable[..., torch.Tensor]] = {"chunked": chunked, "plain": plain}


def batch(sizes: Namespace) -> Batch:
    """Draw hidden states, weight and labels."""
    torch.manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.hidden, requires_grad=True)
    weight = torch.randn(sizes.classes, sizes.hidden).mul_(0.02).requires_grad_()
    return hidden, weight, torch.randint(sizes.classes, (sizes.tokens,))


def run(side: str, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> float:
    """Compute loss and gradients; return the mean loss."""
    hidden.grad = weight.grad = None
    loss = SIDES[side](hidden, weight, labels) / len(labels)
    loss.backward()
    return loss.item()


def peak_bytes(side: str, sizes: Namespace) -> float:
    """Return the peak of resident memory that ``side`` adds, in a separate process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_peak_of_this_process, (side, sizes))


def _peak_of_this_process(side: str, sizes: Namespace) -> float:
    run(side, *batch(Namespace(tokens=8, classes=64, hidden=64)))  # the workspaces of libraries are not the loss's
    tensors = batch(sizes)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from what is resident now
    before = _peak()
    run(side, *tensors)
    return _peak() - before


def _peak() -> float:
    """Return the kernel's peak memory of this process (``ru_maxrss`` starts from the parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure(sizes: Namespace) -> Result:
    """Measure memory once per side, and time in turns."""
    peaks = {side: peak_bytes(side, sizes) for side in SIDES}
    tensors = batch(sizes)
    losses = {side: run(side, *tensors) for side in SIDES}  # a round that does not count
    torch.testing.assert_close(losses["chunked"], losses["plain"], rtol=1e-6, atol=0)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for index in range(sizes.rounds):
        for side in in_turn(tuple(SIDES), index):
            begin = time.perf_counter()
            for _ in range(sizes.steps):
                run(side, *tensors)
            seconds[side].append((time.perf_counter() - begin) / sizes.steps)
    ratios = [ours / theirs for ours, theirs in zip(seconds["chunked"], seconds["plain"], strict=True)]
    return Result(
        name="loss",
        formula=FORMULA,
        figures={
            "memory_ratio": peaks["chunked"] / peaks["plain"],
            "time_ratio": median(ratios),
            **{f"{side}_peak_mib": peak / 2**20 for side, peak in peaks.items()},
            **{f"{side}_seconds": median(values) for side, values in seconds.items()},
            **{name: float(getattr(sizes, name)) for name in ("tokens", "classes", "hidden")},
        },
        rounds={**{f"{side}_seconds": values for side, values in seconds.items()}, "time_ratio": ratios},
    )


def main() -> None:
    """Measure and report."""
    options = parser(sys.modules[__name__].__doc__ or "", rounds=7, steps=1)
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--classes", type=int, default=150_000)
    options.add_argument("--hidden", type=int, default=512)
    given = start(options)
    report(measure(given), given.json)


if __name__ == "__main__":
    main()
