"""The device that a run trains on."""

from __future__ import annotations

import torch

from omnitrain.errors import UserError
from omnitrain.recipe import Train
from omnitrain.train.launch.environment import local_rank, local_world_size


def use_device(settings: Train) -> torch.device:
    """The device that ``settings`` name, with torch's threads set as they say.

    Of several ranks on a machine with CUDA, each has a device of its own: its local rank's.

    Raises:
        UserError: no such device here, or not one for each rank.
    """
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
        raise UserError(f"train.device: {name!r} is no device; expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"train.device: {name!r} asked for, and torch {torch.__version__} finds no CUDA device")
    if device.type == "cpu":
        return device
    if local_world_size() > 1:
        device = _own_device(device)
    if device.index is not None:  # kernels of triton, process groups and meshes go by the current one
        torch.cuda.set_device(device)
    return device


def _own_device(asked: torch.device) -> torch.device:
    """The CUDA device of this one of several ranks."""
    ranks, devices = local_world_size(), torch.cuda.device_count()
    if ":" in str(asked):
        raise UserError(f"train.device: '{asked}' asked for by {ranks} ranks; expected cuda, which is one for each")
    if ranks > devices:
        raise UserError(
            f"{ranks} ranks on this machine, which has {devices} CUDA device{'s' * (devices > 1)}; expected at most "
            "one rank for each (--nproc of omnitrain run, --nproc-per-node of torchrun), or train.device=cpu"
        )
    return torch.device("cuda", local_rank())
