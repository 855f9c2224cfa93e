"""Parameters without weights are read at no cost, and as different values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omnitrain.models.discovery.parameter_reads import ParameterReads

VALUES = 2**24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_a_large_parameter_without_weights_takes_no_memory_of_its_size(dtype: torch.dtype) -> None:
    table = nn.Embedding(400_000, 4096, device="meta", dtype=dtype)  # 6.6 GB in fp32
    with ParameterReads(table) as reads, torch.no_grad():
        window = table.weight.detach()
        rows = table(torch.tensor([0, 1, 2, 399_999]))
    assert window.shape == (400_000, 4096) and window.untyped_storage().nbytes() == VALUES * dtype.itemsize
    assert reads.names == {"weight"}
    assert len(torch.unique(rows, dim=0)) == 4 and rows.dtype == dtype


def test_parameters_of_one_shape_differ_and_each_is_the_same_at_every_read() -> None:
    one, other = (nn.Linear(512, 512, bias=False, device="meta") for _ in range(2))
    model = nn.ModuleList([one, other])
    x = torch.eye(512)
    with ParameterReads(model), torch.no_grad():
        first, again, second = one(x), one(x), other(x)
    assert torch.equal(first, again)
    assert (first == second).float().mean() < 0.01
    assert len(torch.unique(first)) > 200_000
