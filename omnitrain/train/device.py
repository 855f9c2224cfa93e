"""Choose the device that a run trains on."""

from __future__ import annotations

import torch

from omnitrain.errors import UserError
from omnitrain.parallel.environment import gpu_of_rank, prepare_process
from omnitrain.recipe import ParallelPlan, Precision, Train
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.train.launch.environment import local_world_size


def use_device(settings: Train) -> torch.device:
    """Return the device of ``settings``, on CUDA the GPU of the local rank, or raise UserError; set CPU threads."""
    prepare_process()
    if settings.cpu_threads is not None:
        torch.set_num_threads(settings.cpu_threads)
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"train.device: {name!r} is not a device; expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"train.device is {name!r}, but torch {torch.__version__} finds no CUDA device")
    if device.type == "cpu":
        return device
    if local_world_size() > 1:
        machines_for(device, local_world_size())  # refuses `cuda:N`
        device = gpu_of_rank()
    if device.index is not None:  # triton kernels, process groups and meshes use the current device
        torch.cuda.set_device(device)
    return device


def require_devices(requested: torch.device, ranks: int) -> None:
    """Raise a UserError if several of ``ranks`` ranks on this machine would share a CUDA device."""
    if machines_for(requested, ranks) > 1:
        devices = torch.cuda.device_count()
        raise UserError(
            f"this machine runs {ranks} ranks but has {devices} CUDA device{'s' * (devices > 1)}; start at most one "
            "rank per device (--nproc of omnitrain run, --nproc-per-node of torchrun), or set train.device=cpu"
        )


def machines_for(requested: torch.device, ranks: int) -> int:
    """Return how many such machines ``ranks`` ranks need; UserError: several would share ``requested``."""
    if requested.type == "cpu" or ranks == 1:
        return 1
    if ":" in str(requested):
        raise UserError(f"train.device is '{requested}' for {ranks} ranks; use cuda, which gives each its own device")
    return -(-ranks // torch.cuda.device_count())


def mixed_precision(settings: Train, device_type: str) -> bool | None:
    """Return the ``enable_mixed_precision`` of ``build_parallelize_model`` that `train.precision` means on a device.

    True: bf16 compute with fp32 weights, unless a component's plan differs. False: fp32, and no plan may differ.
    None: fp32, unless a component's plan differs.
    """
    if settings.precision == "auto":
        return True if device_type == "cuda" else None
    return settings.precision == "bf16"


def compute_dtype(plan: ParallelPlan, mixed: bool | None) -> torch.dtype:
    """Return the dtype in which the foundation computes; ``mixed``: see :func:`mixed_precision`."""
    precision = plan.of(FOUNDATION).precision or Precision()
    return getattr(torch, precision.compute or ("bfloat16" if mixed else precision.param) or "float32")
