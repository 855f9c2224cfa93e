"""What the benchmarks on one GPU share: options, sides one after the other, what is measured of them, and a report."""

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
    """Read the command line; adds the device, and the tokens of a pack where they are not given."""
    options.add_argument("--tokens", type=int, help=f"of a pack; {tokens}, and 256 with --tiny")
    options.add_argument("--layers", type=int, help="of the language model; unset: as many as fit")
    options.add_argument("--tiny", action="store_true", help="toy sizes, which a CPU can do")
    options.add_argument("--seconds", type=float, default=25.0, help="of the rounds of a side, if there are many")
    options.add_argument("--eager", action="store_true", help="our blocks are not compiled")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with more of them HF Trainer would use all
    given = start(options)
    given.tokens = given.tokens or (256 if given.tiny else tokens)
    given.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return given


def synchronize(device: torch.device) -> None:
    """All that was asked of the device is done."""
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
        """A round."""
        self.seconds += seconds
        self.tokens_per_second.append(tokens / seconds)
        self.operations_per_second.append(performed / seconds)


Name = TypeVar("Name", str, tuple[str, str])
Outcome = TypeVar("Outcome")
Run = Callable[[], Measured]


def attempted(name: str, run: Callable[[], Outcome]) -> Outcome | None:
    """What ``run`` returns; None: it failed, and why is printed."""
    try:
        return run()
    except Exception:  # whatever transformers, liger, a compiler or the memory lacks
        traceback.print_exc()
        print(f"{name} failed", flush=True)
        return None


def measured_one_by_one(device: torch.device, sides: dict[Name, Run]) -> Iterator[tuple[Name, Measured]]:
    """Each side has the memory for itself: two models do not fit at once.

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
    """What was measured, and then an error where something was not, or where losses differ."""
    report(result, given.json)
    if not (error := result.figures["loss_error"]) < LOSS_TOLERANCE:
        sys.exit(f"{result.name}: losses of sides differ by {error:.2g}; less than {LOSS_TOLERANCE:g} was expected")
    if failed := result.figures["failed_sides"]:
        sys.exit(f"{result.name}: {failed:.0f} sides failed; see above")
