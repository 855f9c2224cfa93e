"""Shared code of the benchmarks on one GPU: options, running the sides one by one, measurements, and a report."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch
from harness import Result, report, start

from omnitrain.train.metrics.meter import peak_memory_mb

LOSS_TOLERANCE = 1e-2  # of bf16
WARM_UP = 3  # steps of a side before its clock starts: compilation, allocation


def start_on_device(options: ArgumentParser, tokens: int) -> Namespace:
    """Read the command line; add the device, and the default number of tokens of a pack."""
    options.add_argument("--tokens", type=int, help=f"tokens of a pack; default {tokens}, or 256 with --tiny")
    options.add_argument("--layers", type=int, help="layers of the language model; default: as many as fit in memory")
    options.add_argument("--tiny", action="store_true", help="tiny sizes that run on a CPU")
    options.add_argument("--seconds", type=float, default=25.0, help="time limit of the measured rounds of a side")
    options.add_argument("--eager", action="store_true", help="do not compile omnitrain's blocks")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with more of them HF Trainer would use all
    given = start(options)
    given.tokens = given.tokens or (256 if given.tiny else tokens)
    given.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return given


def synchronize(device: torch.device) -> None:
    """Wait for all queued work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Measured:
    """One side.

    Attributes:
        tokens_per_second: without padding, per round.
        operations_per_second: per round.
        first_losses: of the first batches, at least of one.
        seconds: of all rounds.
        peak_mib: of memory.
        uses_liger: HF ran liger's kernels.
    """

    tokens_per_second: list[float] = field(default_factory=list)
    operations_per_second: list[float] = field(default_factory=list)
    first_losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    peak_mib: float = 0.0
    uses_liger: bool = False

    def add(self, tokens: int, performed: float, seconds: float) -> None:
        """Add a round."""
        self.seconds += seconds
        self.tokens_per_second.append(tokens / seconds)
        self.operations_per_second.append(performed / seconds)


Name = TypeVar("Name", str, tuple[str, str])
Outcome = TypeVar("Outcome")
Run = Callable[[], Measured]


def attempted(name: str, run: Callable[[], Outcome]) -> Outcome | None:
    """Return the result of ``run``; None: it failed, and the reason is printed."""
    try:
        return run()
    except Exception:  # whatever transformers, liger, a compiler or the memory lacks
        traceback.print_exc()
        print(f"{name} failed", flush=True)
        return None


def measured_one_by_one(device: torch.device, sides: dict[Name, Run]) -> Iterator[tuple[Name, Measured]]:
    """Run the sides one by one: two models do not fit in memory at once.

    One that fails is left out, and why is printed: what the others took minutes for is not lost.
    """
    for side, run in sides.items():
        for _ in range(3):  # what is found may hold more from outside Python: a model goes with the second
            gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        name, began = side if isinstance(side, str) else " ".join(side), time.perf_counter()
        if (measured := attempted(name, run)) is None:
            continue
        measured.peak_mib = peak_memory_mb(device)
        tokens, seconds = median(measured.tokens_per_second), time.perf_counter() - began
        print(f"{name}: {tokens:,.0f} tokens/s, {measured.peak_mib:,.0f} MiB; took {seconds:.0f} s", flush=True)
        yield side, measured


def loss_error(sides: Sequence[Measured]) -> float:
    """The largest relative difference between the first losses of the first side and of another one.

    For the same weights and samples they are the same up to the rounding of bf16. 0 where nothing is to be compared.
    """
    return max((abs(side.first_losses[0] / sides[0].first_losses[0] - 1) for side in sides), default=0.0)


def report_all(result: Result, given: Namespace) -> None:
    """Report the measurements; then raise if a side failed or losses differ."""
    report(result, given.json)
    if not (error := result.figures["loss_error"]) < LOSS_TOLERANCE:
        sys.exit(f"{result.name}: losses of sides differ by {error:.2g}; less than {LOSS_TOLERANCE:g} was expected")
    if failed := result.figures["failed_sides"]:
        sys.exit(f"{result.name}: {failed:.0f} sides failed; see above")
