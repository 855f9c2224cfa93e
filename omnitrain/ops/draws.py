"""Random numbers, such as dropout's, by micro-batch and block: the order of forwards does not change them.

A forward seeds the generators at its start, after the encoders and before each block. A pipeline stage, a recomputation
and one process then draw the same numbers, whatever ran before.

Others, such as noise, are a function of seeds alone: the ``i``-th number of a seed is a hash of both (splitmix64), so
that any rank, pack or batch that has the seed draws the same ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of splitmix64


def seed_device(seed: int, device: torch.device) -> None:
    """Seed ``device`` and the host; ``torch.manual_seed`` would also record a stack for each missing accelerator."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def mixed_seed(*parts: int | str) -> int:
    """Return a seed of 64 bits for numbers or names; seeds of near numbers have nothing in common."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


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


_INDEX = "_index_of_draws"


# The seed of the running forward, of the step and the micro-batch, and the blocks' device.
_draws: ContextVar[tuple[int, torch.device] | None] = ContextVar("draws", default=None)


def seed_blocks(blocks: Iterable[nn.Module]) -> None:
    """Let each block of a model, in order, seed the generators before its forward, inside :meth:`StepDraws.forward`.

    transformers checkpoints inside of a block's hooks, and torch keeps the generators' states for the recomputation.
    """
    for index, block in enumerate(blocks):
        setattr(block, _INDEX, index)
        block.register_forward_pre_hook(_seed)


def seed_foundation() -> None:
    """Seed for the embeddings, after encoders, which draw different numbers on tensor parallel ranks."""
    _begin("foundation")


@torch.compiler.disable
def _seed(block: nn.Module, _: Any) -> None:
    _begin(getattr(block, _INDEX))


def _begin(part: int | str) -> None:
    """Seed the generators for a part of the running forward: a block, or code before the first block."""
    if (draws := _draws.get()) is not None:
        seed, device = draws
        seed_device(mixed_seed(seed, part), device)


class StepDraws:
    """The random numbers of a step on ``device``, from a seed that is drawn from the host's generator.

    Tensor parallel ranks and pipeline ranks must seed that generator equally. Ranks that share a sequence must not,
    because they have other tokens.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seed = int(torch.randint(2**63 - 1, ()))

    @contextmanager
    def forward(self, *position: int | str) -> Iterator[None]:
        """Draw the numbers of a part of the step, a micro-batch or other numbers and names; generators stay."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            token = _draws.set((mixed_seed(self._seed, *position), self._device))
            try:
                _begin("")
                yield
            finally:
                _draws.reset(token)
