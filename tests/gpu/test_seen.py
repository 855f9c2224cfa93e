"""What `make gpu` makes of torch's warnings of waits, and of the sanitizer's races."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu import races, waits
from torch.cuda import _sanitizer

from omnitrain.models.omni.model import OmniModel

# A line of a module of omnitrain that waits, as far as Python sees it.
WAITS = compile("def wait():\n    for _ in range(3):\n        warnings.warn(message)\n", "file", "exec")


def test_each_wait_of_which_torch_warns_counts_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    message = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:147.)"
    module: dict[str, Any] = {"__name__": "omnitrain.made_up", "warnings": warnings, "message": message}
    exec(WAITS, module)
    with waits.counted_by_torch() as found:
        module["wait"]()
        warnings.warn("something else", stacklevel=1)
    assert found == {"omnitrain.made_up wait:3": 3} and modes == ["warn", "default"]


def test_waits_on_a_cpu_leave_the_model_as_it_was() -> None:
    before, step = OmniModel.device, SimpleNamespace(model=torch.nn.Linear(2, 2))
    with waits.counted_on_cpu(step) as found:  # type: ignore[arg-type]
        step.model.weight.sum().item()
    assert found.total() == 1 and OmniModel.device is before


class Racing:
    """A step whose kernels race."""

    def __init__(self) -> None:
        self.plan: dict[str, Any] = {}

    def obstacle(self, device: torch.device) -> str | None:
        return None

    @contextmanager
    def on(self, device: torch.device, compute: str) -> Iterator[Any]:
        raise _sanitizer.CUDASanitizerErrors([SyntaxError("stream 1 writes what stream 2 reads")] * 2)  # type: ignore
        yield


def test_a_race_is_told_in_words_and_ends_the_phase(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(races, "STEPS", {"one": Racing()})
    monkeypatch.setattr(races, "this_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(races, "free_memory", lambda device: None)
    monkeypatch.setattr(_sanitizer, "enable_cuda_sanitizer", lambda: None)
    found: list[tuple[str, float | str]] = []
    with pytest.raises(SystemExit, match=r"races: one$"):
        found.extend(races.run(True, tmp_path))
    assert found == [("races of one", "2 races: stream 1 writes what stream 2 reads")]
