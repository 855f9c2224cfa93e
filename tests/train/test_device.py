from __future__ import annotations

import pytest
import torch

from omnitrain.errors import UserError
from omnitrain.recipe import ComponentPlan, ParallelPlan, Precision, Train
from omnitrain.train.device import use_device
from omnitrain.train.precision import compute_dtype


@pytest.fixture
def _two_devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two CUDA devices, as far as torch tells; the fixture's value lists those made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_each_rank_has_the_device_of_its_local_rank(
    asked: str, _two_devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert use_device(Train(device=asked)) == torch.device("cuda:1")
    assert _two_devices == [torch.device("cuda:1")]


def test_more_ranks_than_devices_are_refused_unless_on_cpu(
    _two_devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match="3 ranks on this machine, which has 2 CUDA devices"):
        use_device(Train())
    assert use_device(Train(device="cpu")) == torch.device("cpu")


def test_one_device_for_several_ranks_is_refused(
    _two_devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="'cuda:1' asked for by 2 ranks"):
        use_device(Train(device="cuda:1"))


def test_a_process_alone_may_name_any_device(_two_devices: list[torch.device]) -> None:
    assert use_device(Train()) == torch.device("cuda") and _two_devices == []
    assert use_device(Train(device="cuda:1")) == torch.device("cuda:1")
    assert _two_devices == [torch.device("cuda:1")]  # kernels of triton are launched on the current one


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (None, torch.float32),
        (Precision(param="bfloat16"), torch.bfloat16),
        (Precision(compute="bfloat16"), torch.bfloat16),
        (Precision(param="bfloat16", compute="float32"), torch.float32),
    ],
)
def test_backends_are_asked_for_the_dtype_in_which_the_foundation_computes(
    precision: Precision | None, dtype: torch.dtype
) -> None:
    assert compute_dtype(ParallelPlan(default=ComponentPlan(precision=precision)), None) == dtype
