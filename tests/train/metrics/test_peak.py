from __future__ import annotations

import pytest
import torch

from omnitrain.train.metrics.flops import of_data_sheet, peak_of


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
    ],
)
def test_the_peak_of_a_known_device_is_that_of_its_data_sheet(name: str, teraflops: int) -> None:
    peak = of_data_sheet(name)
    assert peak is not None and peak.flops == teraflops * 1e12 and "data sheet" in peak.source


def test_the_peak_of_another_device_is_measured_and_said_to_be() -> None:
    assert of_data_sheet("NVIDIA GeForce RTX 4090") is None
    peak = peak_of(torch.device("cpu"), torch.float32)
    assert peak.flops > 1e8
    assert peak.source == "measured: the fastest of 5 products of 512 x 512 in float32"
