"""What a process needs before it uses a GPU or makes process groups: variables, the allocator, open files, its GPU.

omnitrain sets the variables that the user has not set, and only before torch has started CUDA: later, they have no
effect. Functions import torch, since `omnitrain doctor` also runs where torch does not import.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from omnitrain.errors import UserError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


from pathlib import Path


class Variable(NamedTuple):
    """An environment variable that a process with a GPU should have; torch also reads its ``older`` name."""

    name: str
    value: str
    why: str
    older: str = ""


VARIABLES = (
    Variable(
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
        "packs of different sizes do not leave gaps in the GPU's memory",
        older="PYTORCH_CUDA_ALLOC_CONF",
    ),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "32",
        "kernels of several streams, such as those of NCCL, run at the same time as computation",
    ),
    Variable(
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "torch's flight recorder keeps the last collectives of each rank",
        older="TORCH_NCCL_TRACE_BUFFER_SIZE",
    ),
)
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""A variable of NCCL: 1 lets several ranks have parts of one GPU."""


def prepare_process() -> None:
    """Set the variables that are missing, and let this process open as many files as the system allows it."""
    import torch

    if torch.version.cuda is not None and not torch.cuda.is_initialized():
        os.environ.update({variable.name: variable.value for variable in missing_variables()})
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS has a lower limit than it tells
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def missing_variables() -> Iterator[Variable]:
    """Yield the variables that nobody has set."""
    return (one for one in VARIABLES if os.environ.keys().isdisjoint((one.name, one.older)))


def gpu_of_rank() -> torch.device:
    """Return the GPU of this rank's local rank among those that it sees, or the only one that it sees."""
    import torch

    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def require_own_gpu(store: dist.Store, rank: int) -> None:
    """Raise UserError if another rank has the current GPU: NCCL would wait for ever, or not name the two ranks.

    Parts of one GPU (MIG) may have its UUID, and are one GPU to NCCL, too, unless the user asks it for more.
    """
    import torch

    if os.environ.get(SHARED_GPU) == "1":
        return
    gpu = f"{socket.gethostname()}, {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    owner = int(store.compare_set(f"gpu/{gpu}", "", str(rank)))
    if owner != rank:
        raise UserError(
            f"ranks {owner} and {rank} have the same GPU ({gpu}); start at most one rank per GPU (--nproc of omnitrain "
            "run, --nproc-per-node of torchrun, one task per GPU in Slurm); for parts of one GPU (MIG), which need "
            f"NCCL 2.31 or later, set {SHARED_GPU}=1"
        )


_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Return the bytes that new processes can use, by /proc/meminfo and the container's limit; None without them."""
    lines = _MEMINFO.read_text().splitlines() if _MEMINFO.is_file() else []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = (_read_int(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free.append(max(limit - used, 0))
    return min(free, default=None)


def _read_int(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None
