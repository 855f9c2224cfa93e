"""More ranks than this machine has cores."""

from __future__ import annotations

import os
import resource
import sys

import torch

from omnitrain.parallel.memory.allocator import available_memory

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def crowding(device: str, num_ranks: int) -> str | None:
    """Return the warning for ranks of this machine that would share cores; None: none would, or they train on CUDA."""
    cores = num_cores()
    if num_ranks <= cores or device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return None
    # A rank imports at least what this process has imported: python and torch.
    needed = num_ranks * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
    free = available_memory()
    left = "" if free is None else f", and {free / 2**30:.1f} GiB are free"
    return (
        f"--nproc {num_ranks} on {cores} core{'s' * (cores > 1)}: about {num_ranks / cores:.3g} ranks share a core, so "
        f"the start alone may take minutes; {num_ranks} ranks need at least {needed / 2**30:.1f} GiB of memory without "
        f"the model{left}"
    )
