"""Tensors of the host on their way to a device."""

from __future__ import annotations

import torch


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` of the host on ``device``. A plain copy to a GPU would first wait for all that is queued there."""
    return tensor.to(device, non_blocking=device.type == "cuda")
