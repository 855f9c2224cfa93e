"""Where the ranks of a run lie."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from omnitrain.parallel.state import leave_process_groups
from omnitrain.recipe import ParallelPlan
from omnitrain.recipe.parallel import ComponentPlan
from omnitrain.train.process_groups import join_ranks


@pytest.fixture
def _beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield
    leave_process_groups()


@pytest.mark.usefixtures("_beside_a_gpu")
def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_stays_there() -> None:
    plan = ParallelPlan(default=ComponentPlan(mode="fsdp2"))
    state = join_ranks(plan, torch.device("cpu")).state
    assert state is not None and state.device_type == "cpu"
