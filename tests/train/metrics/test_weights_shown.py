"""A load that takes long says how fast it is."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from omnitrain.models.hf.stored_tensor import stored_tensors
from omnitrain.train.metrics import progress


@pytest.mark.parametrize(("seconds", "printed"), [(4.0, "weights: 8 MB read by rank 0 in 8 s (1 MB/s)\n"), (0.1, "")])
def test_a_long_load_prints_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, printed: str
) -> None:
    save_file({name: torch.zeros(1_000_000) for name in "abc"}, tmp_path / "model.safetensors")
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=120)
    with progress.weights_shown(console):
        for tensor in stored_tensors([str(tmp_path / "model.safetensors")]).values():
            tensor.read()
            now[0] += seconds
    assert isinstance(console.file, io.StringIO) and console.file.getvalue() == printed
