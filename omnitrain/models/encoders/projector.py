"""Projectors from a tower's rows to the foundation's hidden size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Projector(nn.Module):
    """``linear``, ``mlp`` or ``pixel_shuffle`` (merge neighbours, then MLP; Chen et al. 2024, InternVL 1.5).

    The merge itself is :func:`merge_grid` for images and :func:`merge_frames` for sound.
    """

    def __init__(self, kind: str, factor: int, merged_rows: int, tower_size: int, hidden_size: int) -> None:
        """``merged_rows``: tower rows that ``pixel_shuffle`` joins into one (``factor ** 2`` or ``factor``)."""
        super().__init__()
        self.factor = factor if kind == "pixel_shuffle" else 1
        width = tower_size * (merged_rows if kind == "pixel_shuffle" else 1)
        layers: list[nn.Module] = [nn.Linear(width, hidden_size)]
        if kind != "linear":
            layers = [nn.LayerNorm(width), *layers, nn.GELU(), nn.Linear(hidden_size, hidden_size)]
        self.layers = nn.Sequential(*layers)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., width] -> [..., hidden]``."""
        return self.layers(rows)


def merge_grid(patches: torch.Tensor, factor: int) -> torch.Tensor:
    """Join each ``factor`` x ``factor`` block: ``[N, H, W, D] -> [N, H/f * W/f, f*f*D]``, row by row."""
    n, height, width, dim = patches.shape
    blocks = patches.unflatten(2, (width // factor, factor)).unflatten(1, (height // factor, factor))
    return blocks.transpose(2, 3).reshape(n, (height // factor) * (width // factor), factor * factor * dim)


def merge_frames(frames: torch.Tensor, factor: int) -> torch.Tensor:
    """Join ``factor`` neighbours, zeros behind the last: ``[N, P, D] -> [N, ceil(P/f), f*D]``."""
    missing: Any = -frames.size(1) % factor
    return nn.functional.pad(frames, (0, 0, 0, missing)).unflatten(1, (-1, factor)).flatten(2)
