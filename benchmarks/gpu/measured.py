"""What the sides of a phase measure, one side after the other: two models do not fit in memory at once."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from pydantic import ValidationError

from omnitrain.errors import UserError
from omnitrain.train.metrics.meter import peak_memory_mb

Figures = Iterator[tuple[str, float | str]]
"""Name -> a number; or words, where there is none: why it was not measured."""
LOSS_TOLERANCE = 1e-2  # of bf16
NEEDS_CUDA = "needs cuda"
MOST_WORDS = 300  # letters of a reason
WARM_UP = 3  # steps of a side before its clock starts: compilation, allocation


@dataclass(frozen=True)
class Load:
    """How much a side computes.

    Attributes:
        device: where.
        tokens: of a pack.
        rounds: at most.
        steps: optimizer steps of a round.
        seconds: of all rounds, after which no other one begins.
    """

    device: torch.device
    tokens: int
    rounds: int
    steps: int
    seconds: float

    @classmethod
    def of(cls, tiny: bool, tokens: int) -> Load:
        """Return that of a phase whose packs have ``tokens`` tokens."""
        device = this_device()
        return cls(device, 256, 1, 1, 0.0) if tiny else cls(device, tokens, 5, 2, 2.0)


def this_device() -> torch.device:
    """Return the GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


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
        first_loss: of the first batch.
        seconds: of all rounds.
        peak_mib: of memory.
        uses_liger: HF ran liger's kernels.
    """

    tokens_per_second: list[float] = field(default_factory=list)
    operations_per_second: list[float] = field(default_factory=list)
    first_loss: float = 0.0
    seconds: float = 0.0
    peak_mib: float = 0.0
    uses_liger: bool = False

    def add(self, tokens: int, performed: float, seconds: float) -> None:
        """Add a round."""
        self.seconds += seconds
        self.tokens_per_second.append(tokens / seconds)
        self.operations_per_second.append(performed / seconds)


Run = Callable[[], Measured]


class Sides:
    """The sides of a phase: a figure of each, and the ratios of some to another one.

    A side that cannot run here has the reason in place of its speed. One that fails has its error there, and the
    phase fails at its end: what the others took a minute for is not lost.

    Attributes:
        measured: side -> what it measured.
        failed: names of the sides that failed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.measured: dict[str, Measured] = {}
        self.failed: list[str] = []

    def run(self, sides: Mapping[str, Run]) -> Figures:
        """Run them in their order."""
        for side, run in sides.items():
            free_memory(self._device)
            began = time.perf_counter()
            try:
                found = self.measured[side] = run()
            except (UserError, ValidationError) as error:
                yield f"{side} tokens/s", why_not(error)
                continue
            except Exception as error:  # whatever transformers, liger, a compiler or the memory lacks
                traceback.print_exc()
                self.failed.append(side)
                yield f"{side} tokens/s", f"failed: {' '.join(str(error).split()) or type(error).__name__}"
                continue
            found.peak_mib = peak_memory_mb(self._device)
            yield f"{side} tokens/s", median(found.tokens_per_second)
            yield f"{side} TFLOP/s", median(found.operations_per_second) / 1e12
            yield f"{side} peak MiB", found.peak_mib
            yield f"{side} seconds", time.perf_counter() - began

    def ratios(self, to: str) -> Figures:
        """Yield the speed of each side as a multiple of the fastest whose name begins with ``to``."""
        speeds = {side: median(measured.tokens_per_second) for side, measured in self.measured.items()}
        best = max((side for side in speeds if side.startswith(to)), key=speeds.__getitem__, default=None)
        for side in speeds if best else ():
            if side != best:
                yield f"{side} / {best}", speeds[side] / speeds[best]

    def finish(self, needed: str) -> Figures:
        """Yield the largest relative difference of a first loss to that of the first side; say what went wrong.

        For the same weights and samples they are the same up to the rounding of bf16.

        Args:
            needed: the side without which the others are compared with nothing.

        Raises:
            SystemExit: a side failed, or losses differ by more, or ``needed`` cannot run here.
        """
        failed = list(self.failed)
        if needed not in self.measured and needed not in failed:
            failed.append(f"{needed}: not measured")
        losses = {side: measured.first_loss for side, measured in self.measured.items()}
        first = next(iter(losses.values()), 1.0)
        errors = {side: abs(loss / first - 1) for side, loss in losses.items()}
        yield "loss error", max(errors.values(), default=0.0)
        wrong = [side for side, error in errors.items() if not error < LOSS_TOLERANCE]
        failed += [f"{side}: loss {losses[side]:.6g}" for side in wrong]
        if failed:
            raise SystemExit(f"failed: {', '.join(failed)}")


def why_not(error: Exception) -> str:
    """Return in a line why something cannot run here."""
    words = " ".join(str(error).split())
    return NEEDS_CUDA if "only on CUDA" in words else f"refused: {words[:MOST_WORDS]}"


def free_memory(device: torch.device) -> None:
    """Free what the side before left, and measure the peak of memory anew."""
    for _ in range(3):  # what is found may hold more from outside Python: a model goes with the second
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
