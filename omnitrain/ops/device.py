"""Copy host tensors to a device without waiting, and seed a device."""

from __future__ import annotations

import hashlib

import torch

from omnitrain.ops.host_values import remember


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to ``device``. A blocking copy to a GPU would wait for all its queued work."""
    there = tensor.to(device, non_blocking=device.type == "cuda")
    return there if there is tensor else remember(there, tensor)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed ``device`` and the host; ``torch.manual_seed`` would also record a stack for each missing accelerator."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def mixed_seed(*parts: int | str) -> int:
    """Return a seed of 64 bits for numbers or names; seeds of near numbers have nothing in common."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")
