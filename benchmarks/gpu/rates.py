"""What the GPU of a machine does per second at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from gpu.measured import NEEDS_CUDA, Figures, synchronize, this_device

# Rows of a pack, and widths of Qwen3-4B: queries, MLP, head.
PRODUCTS = {"square": (8192, 8192, 8192), "queries": (8192, 2560, 4096), "mlp": (8192, 2560, 19456)}
EXPERTS, EXPERT_ROWS, EXPERT_PRODUCT = 128, 512, (2048, 1536)  # of Qwen3-30B-A3B: gate and up
MIB = {"full": 256, "tiny": 1}


def rates(tiny: bool) -> Figures:
    """Yield rates of products, copies and launches."""
    device, by = this_device(), 64 if tiny else 1
    for name, sides in PRODUCTS.items():
        m, k, n = (side // by for side in sides)
        a, b = torch.randn(m, k, device=device).bfloat16(), torch.randn(k, n, device=device).bfloat16()
        yield f"product {name} {m}x{k}x{n} TFLOP/s", 2e-12 * m * k * n / _seconds(lambda a=a, b=b: a @ b, device)
    experts, rows = EXPERTS // by, EXPERT_ROWS // by
    k, n = (side // by for side in EXPERT_PRODUCT)
    a = torch.randn(experts * rows, k, device=device).bfloat16()
    b, ends = torch.randn(experts, k, n, device=device).bfloat16(), torch.arange(1, experts + 1, device=device) * rows
    seconds = _seconds(lambda: F.grouped_mm(a, b, offs=ends.int()), device)
    yield f"grouped_mm {experts} x {rows}x{k}x{n} TFLOP/s", 2e-12 * len(a) * k * n / seconds
    yield from _copies(device, MIB["tiny" if tiny else "full"] * 2**20)
    yield from _launches(device)


def _copies(device: torch.device, size: int) -> Figures:
    there = torch.empty(size, dtype=torch.uint8, device=device)
    other, host = torch.empty_like(there), torch.empty(size, dtype=torch.uint8)
    yield "copy on the device GB/s", 1e-9 * size / _seconds(lambda: other.copy_(there), device)
    yield "upload pageable GB/s", 1e-9 * size / _seconds(lambda: there.copy_(host), device)
    if device.type != "cuda":
        yield "upload pinned GB/s", NEEDS_CUDA
        yield "download pinned GB/s", NEEDS_CUDA
        return
    pinned = host.pin_memory()
    yield "upload pinned GB/s", 1e-9 * size / _seconds(lambda: there.copy_(pinned, non_blocking=True), device)
    yield "download pinned GB/s", 1e-9 * size / _seconds(lambda: pinned.copy_(there, non_blocking=True), device)


def _launches(device: torch.device, number: int = 1000) -> Figures:
    one = torch.zeros(1, device=device)

    def add() -> None:
        for _ in range(number):
            one.add_(1)

    began = time.perf_counter()
    add()
    queued = time.perf_counter() - began
    synchronize(device)
    yield "launch of a kernel, host, us", 1e6 * queued / number
    yield "launch of a kernel, with its run, us", 1e6 * _seconds(add, device) / number
    yield "wait for a value, us", 1e6 * _seconds(one.item, device)


def _seconds(work: Callable[[], Any], device: torch.device, times: int = 20) -> float:
    """Return the median of some runs, each to its end, after five that do not count: a GPU's clock rises slowly."""
    found = []
    for _ in range(5 + times):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return median(found[5:])
