"""The device that a run trains on."""

from __future__ import annotations

import torch

from omnitrain.errors import UserError
from omnitrain.recipe import Train


def use_device(settings: Train) -> torch.device:
    """The device that ``settings`` name, with torch's threads set as they say.

    Raises:
        UserError: no such device here.
    """
    if settings.cpu_threads is not None:
        torch.set_num_threads(settings.cpu_threads)
    name = settings.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"train.device: {name!r} is no device; expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"train.device: {name!r} asked for, and torch {torch.__version__} finds no CUDA device")
    return device
