"""What a process needs before it uses a GPU; torch is made to tell of GPUs that this machine lacks."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from omnitrain.errors import UserError
from omnitrain.parallel.environment import VARIABLES, gpu_of_rank, prepare_process, require_own_gpu
from omnitrain.report.doctor import _environment

PAGE = Path(__file__).parents[2] / "docs" / "launch.md"


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for CUDA, and an environment without its variables."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for variable in VARIABLES:
        for name in filter(None, (variable.name, variable.older)):
            monkeypatch.setenv(name, "")  # so that it is restored
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("_cuda")
def test_variables_are_set_where_the_user_has_set_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")  # the older name
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    prepare_process()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"


@pytest.mark.usefixtures("_cuda")
def test_nothing_is_set_once_torch_has_started_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    prepare_process()
    assert not any(variable.name in os.environ for variable in VARIABLES)


@pytest.mark.usefixtures("_cuda")
def test_doctor_says_which_variables_are_set_and_what_omnitrain_would_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "10")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    found = {finding.name: (finding.found, finding.ok) for finding in _environment()}
    assert found["TORCH_FR_BUFFER_SIZE"] == ("TORCH_NCCL_TRACE_BUFFER_SIZE=10", True)
    assert found["NCCL_IB_HCA"] == ("mlx5_0, set by you", True) and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in found
    told, ok = found["CUDA_DEVICE_MAX_CONNECTIONS"]
    assert told.startswith("not set; omnitrain sets 32: kernels of several streams") and ok is None
    assert "omnitrain raises the limit to" in found["open files"][0]


def test_a_process_may_open_as_many_files_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        prepare_process()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("local_rank", "visible", "index"), [(3, 8, 3), (3, 1, 0), (5, 4, 1)])
def test_a_rank_takes_the_gpu_of_its_local_rank_among_those_that_it_sees(
    local_rank: int, visible: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert gpu_of_rank() == torch.device("cuda", index)


def test_two_ranks_with_one_gpu_are_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for rank, uuid in ((0, "a"), (1, "b")):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, uuid=uuid: SimpleNamespace(uuid=uuid))
        require_own_gpu(store, rank)
    with pytest.raises(UserError, match=r"ranks 1 and 2 have the same GPU \(.*, b\); start at most one rank per GPU"):
        require_own_gpu(store, 2)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # parts of a GPU
    require_own_gpu(store, 2)


def test_the_page_has_the_variables_of_the_code() -> None:
    table = PAGE.read_text().split("| variable | value | why |")[1].split("\n\n")[0]
    expected = [f"| `{one.name}` | `{one.value}` | {one.why} |" for one in VARIABLES]
    assert table.splitlines()[2:] == expected
