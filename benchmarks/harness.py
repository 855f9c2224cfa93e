"""Shared code of the benchmarks: options, alternating rounds, medians, and a report with its formula."""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from omnitrain.data.loading.loader import StepLoader

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = "recipes/quickstart.yaml"

# Arguments with which HF ``Trainer`` neither logs nor saves, nor waits for the device to look at a loss.
HF_QUIET: dict[str, Any] = {
    "average_tokens_across_devices": False,
    "logging_nan_inf_filter": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}

_PACKAGES = ("torch", "transformers", "accelerate", "numpy")


def parser(description: str, *, rounds: int, steps: int) -> argparse.ArgumentParser:
    """Return the options of every benchmark; ``rounds`` and ``steps`` are the defaults."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", type=Path, help="also write the result to this file")
    options.add_argument("--rounds", type=int, default=rounds, help="measured rounds; the result is their median")
    options.add_argument("--steps", type=int, default=steps, help="optimizer steps per round")
    return options


def start(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, and :func:`settle`."""
    given = options.parse_args()
    if given.json is not None:
        given.json = given.json.resolve()
    settle()
    return given


def settle() -> None:
    """Use one thread, and change to the repository's root, where recipes find their data."""
    os.chdir(ROOT)
    torch.set_num_threads(1)


def in_turn(sides: tuple[str, ...], index: int) -> tuple[str, ...]:
    """Return the order of round ``index``: ``A B``, ``B A``, ...; a drift of the machine affects all sides equally."""
    return sides[::-1] if index % 2 else sides


class Around:
    """Wraps a trainer's loader: a subclass changes the iteration, all other attributes are the loader's."""

    def __init__(self, loader: StepLoader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def peak_of(profiled: profile, span: str) -> int:
    """Bytes: the most that tensors took at a time within the recorded ``span``, of those made since profiling began."""
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    (measured,) = [event for event in events if event.name() == span]
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = accumulate(size for _, size in changes)
    return max(
        size for (at, _), size in zip(changes, live, strict=True) if measured.start_ns() <= at <= measured.end_ns()
    )


@dataclass(frozen=True)
class Result:
    """The result of a benchmark.

    Attributes:
        name: of the benchmark.
        formula: how the first figure follows from the measured seconds.
        figures: name -> number, the headline first.
        rounds: side -> what it measured, one value per round, in order of the rounds.
    """

    name: str
    formula: str
    figures: dict[str, float]
    rounds: dict[str, list[float]]


def report(result: Result, json_path: Path | None) -> None:
    """Print ``result``; with a path, also write it with the versions and the processor of the machine."""
    print(f"{result.name}: {result.formula}")
    for name, value in result.figures.items():
        print(f"  {name:<40} {value:,.4g}" if abs(value) < 1000 else f"  {name:<40} {value:,.0f}")
    if json_path is None:
        return
    where = {"versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}}
    where |= {"cpu": f"{_processor()}, {torch.get_num_threads()} thread"}
    if torch.cuda.is_available():
        where |= {"gpu": torch.cuda.get_device_name()}
    json_path.write_text(json.dumps(vars(result) | where, indent=2) + "\n")


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
