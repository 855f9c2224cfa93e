"""Random numbers that are a function of seeds alone: any rank, pack or batch that has a seed draws the same ones.

There is no generator with a state: the ``i``-th number of a seed is a hash of both (splitmix64).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of splitmix64


def uniforms(seeds: Tensor, width: int, stream: int = 0) -> Tensor:
    """Return ``[n, width]`` float64 in [0, 1), a row for each of ``seeds`` ``[n]`` int64.

    ``stream``: numbers of other streams are independent of these.
    """
    places = torch.arange(1, width + 1, device=seeds.device) + (stream << 32)
    bits = _mixed(_mixed(seeds)[:, None] + places * _STEP)
    return _shifted(bits, 11).double() * 2**-53


def normals(seeds: Tensor, width: int, stream: int = 0) -> Tensor:
    """Return ``[n, width]`` float32 of a standard normal distribution; arguments as of :func:`uniforms`."""
    length, angle = uniforms(seeds, 2 * width, stream).chunk(2, dim=1)
    return ((-2 * torch.log1p(-length)).sqrt() * torch.cos(2 * math.pi * angle)).float()


def _mixed(values: Tensor) -> Tensor:
    """Hash int64; products wrap around."""
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift to the right, as of unsigned numbers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
