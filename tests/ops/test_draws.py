from __future__ import annotations

import pytest
import torch

from omnitrain.ops.draws import seed_device


def test_random_numbers_are_those_of_manual_seed() -> None:
    torch.manual_seed(7)
    expected = torch.randn(3)
    seed_device(7, torch.device("cpu"))
    assert torch.equal(torch.randn(3), expected)


def test_a_device_that_is_not_there_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", asked.append)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", asked.append)
    seed_device(7, torch.device("cpu"))
    assert asked == []
