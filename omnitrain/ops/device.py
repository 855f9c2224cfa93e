"""What is done for one device: tensors of the host on their way to it, and its random numbers."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` of the host on ``device``. A plain copy to a GPU would first wait for all that is queued there."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def seed_device(seed: int, device: torch.device) -> None:
    """Begin the random numbers of ``device`` and of the host anew, as ``torch.manual_seed`` does for all devices.

    That one writes down stack traces for every kind of accelerator that is not there, which takes half a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
