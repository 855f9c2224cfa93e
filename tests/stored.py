"""What a checkpoint's folder of optimizer state holds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors by name."""
    dcp_to_torch_save(folder, folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=True)
