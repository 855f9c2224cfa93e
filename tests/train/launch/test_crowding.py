from __future__ import annotations

import re

import pytest
import torch

from omnitrain.train.launch import launch as module
from omnitrain.train.launch.launch import crowding

GIB = 2**30


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_cores", lambda: 2)
    monkeypatch.setattr(module, "available_memory", lambda: 7 * GIB)


def test_more_ranks_than_cores_are_told_with_cores_and_memory() -> None:
    told = crowding("cpu", 64)
    assert told is not None
    found = re.search(
        r"--nproc 64 on 2 cores: about 32 ranks share a core.* at least ([\d.]+) GiB .*7.0 GiB are free", told
    )
    assert found is not None and 64 * 0.1 < float(found[1]) < 64 * 8  # 0.1 GiB: python and torch


def test_ranks_with_a_core_each_or_on_cuda_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crowding("cpu", 2) is crowding("cuda", 64) is None
    assert crowding("auto", 64) is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert crowding("auto", 64) is None
