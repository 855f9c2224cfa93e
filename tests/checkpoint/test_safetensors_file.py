from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from omnitrain.checkpoint.safetensors_file import _DTYPES, Entry, SafetensorsFile


def test_a_file_that_is_written_tensor_by_tensor_has_the_bytes_of_safetensors(tmp_path: Path) -> None:
    """Of all dtypes, in another order, without elements, without dims."""
    numbers = torch.arange(24).reshape(2, 3, 4)
    tensors = {f"of {name} \u00e9": numbers.to(dtype) for dtype, name in _DTYPES.items() if dtype != torch.complex64}
    tensors |= {"empty": torch.empty(0, 3), "number": torch.tensor(1.5)}
    save_file(tensors, tmp_path / "whole", metadata={"format": "pt"})
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with SafetensorsFile(tmp_path / "parts", entries) as opened:
        for name, tensor in reversed(tensors.items()):
            opened.write(name, tensor)
    assert len(tensors) == 18
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_file_that_cannot_be_written_is_closed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SafetensorsFile(tmp_path / "no folder" / "file", [])
