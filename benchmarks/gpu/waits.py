"""Where the host waits for the device in a step: file, line and how often.

On a GPU torch says so (``set_sync_debug_mode``). On a CPU the tests' model of a device counts reads of its values.
Waits in a backward have the place of the call that started it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from omni_step import OmniStep

from gpu.measured import NEEDS_CUDA, Figures, free_memory, this_device
from gpu.tiny_steps import STEPS
from omnitrain.models.omni.model import OmniModel
from tests.waits import DEVICE, Device, place

SYNCHRONIZES = "synchronizing CUDA operation"  # in torch's warning


@contextmanager
def counted_by_torch() -> Iterator[Counter[str]]:
    """Count torch's warnings by the innermost place of omnitrain or transformers."""
    found: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if SYNCHRONIZES in str(message):
            found[place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


class DeviceWithLines(Device):
    """Counts waits by place and line."""

    def wait(self) -> None:
        """See :class:`Device`."""
        self.waits[place()] += 1


@contextmanager
def counted_on_cpu(step: OmniStep) -> Iterator[Counter[str]]:
    """Count reads of values on a device that the CPU plays."""
    there, known = DeviceWithLines(chain(step.model.parameters(), step.model.buffers())), OmniModel.device
    OmniModel.device = DEVICE  # type: ignore[assignment, method-assign]
    try:
        with there.watched():
            yield there.waits
    finally:
        OmniModel.device = known  # type: ignore[method-assign]


def run(tiny: bool, folder: Path) -> Figures:
    """Yield the number of waits of each place in one warm step."""
    device = this_device()
    for name, how in STEPS.items():
        if (problem := how.obstacle(device)) is not None:
            yield f"{name}: all", NEEDS_CUDA if "only on CUDA" in problem else problem
            continue
        with how.on(device, "bfloat16") as (step, packs):
            step.run(packs[:1])
            with counted_by_torch() if device.type == "cuda" else counted_on_cpu(step) as waits:
                step.run(packs[1:2])
        yield f"{name}: all", float(waits.total())
        for where, times in waits.most_common():
            yield f"{name}: {where}", float(times)
        free_memory(device)
