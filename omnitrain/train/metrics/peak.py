"""The most FLOPs per second of a device: by its data sheet, or measured."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

# Part of the device's name -> bf16 products of dense matrices, FLOPs per second, and its data sheet at nvidia.com. The
# first match counts. The figures of the sheets are for sparse matrices where they say so, twice as high.
_BY_NAME = (
    ("H200 NVL", 835e12, "H200 data sheet"),
    ("H200", 989e12, "H200 data sheet"),
    ("H100 NVL", 835e12, "H100 data sheet"),
    ("H100 PCIe", 756e12, "H100 data sheet"),
    ("H100", 989e12, "H100 data sheet"),
    ("A100", 312e12, "A100 data sheet"),
    ("B200", 2250e12, "B200 data sheet"),
    ("L40S", 362e12, "L40S data sheet"),
)
_SIDE = {"cpu": 512, "cuda": 8192}  # of the matrices that are multiplied
_TRIALS = 5


@dataclass(frozen=True)
class Peak:
    """The most FLOPs per second of a device, and where the figure is from."""

    flops: float
    source: str


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak of ``device`` in products of ``dtype``; unless a data sheet has it, multiply matrices to see."""
    has_sheet = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if has_sheet and (sheet := of_data_sheet(torch.cuda.get_device_name(device))) is not None:
        return sheet
    side = _SIDE[device.type]
    left, right = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    seconds = min(_seconds(left, right) for _ in range(_TRIALS))
    words = str(dtype).removeprefix("torch.")
    return Peak(2 * side**3 / seconds, f"measured: the fastest of {_TRIALS} products of {side} x {side} in {words}")


def of_data_sheet(name: str) -> Peak | None:
    """Return the bf16 peak of the device that torch calls ``name``; None: it is not known."""
    return next((Peak(flops, sheet) for part, flops, sheet in _BY_NAME if part in name), None)


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    began = time.perf_counter()
    _ = left @ right
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - began
