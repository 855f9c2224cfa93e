"""What `make gpu` compares in its phase `right`, one test for each comparison; and that a wrong kernel is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu import checks_of_ops, right
from gpu.checks_of_ops import Check
from torch import Tensor

from omnitrain.ops.attention.backends import BACKENDS
from omnitrain.ops.attention.backends.sdpa import SDPA
from omnitrain.ops.attention.spec import AttentionCall, MaskSpec

CPU = torch.device("cpu")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [pytest.param(check, id=check.name) for check in right.checks()])
def test_a_gpu_computes_what_a_cpu_does_up_to_rounding(check: Check, device: torch.device) -> None:
    if (problem := check.obstacle(device)) is not None:
        pytest.skip(problem)
    assert check.measure(device) <= 1


def test_every_backend_and_feature_of_attention_is_compared() -> None:
    names = {tuple(check.name.split()[1:3]) for check in checks_of_ops.attention_checks()}
    assert {backend for backend, _ in names} == {backend.name for backend in BACKENDS}
    assert {feature for backend, feature in names if backend in ("flex", "reference")} == checks_of_ops.FEATURES.keys()


def wider(call: AttentionCall) -> Tensor:
    """The window is one token too wide."""
    assert call.mask.window is not None
    return SDPA.attend(replace(call, mask=MaskSpec(call.mask.offsets, causal=True, window=call.mask.window + 1)))


@pytest.mark.parametrize(("attend", "is_right"), [(SDPA.attend, True), (wider, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_too_many_is_more_than_rounding_explains(attend: object, is_right: bool, dtype: torch.dtype) -> None:
    backend = replace(SDPA, attend=attend)
    assert (checks_of_ops.attention(backend, "window", 64, dtype).measure(CPU) <= 1) is is_right


def wrong(device: torch.device) -> float:
    return 1.5


def fails(device: torch.device) -> float:
    raise RuntimeError("no kernel\nfor this GPU")


def test_a_wrong_or_failing_check_ends_the_phase_and_takes_no_other_figure_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = [
        Check("first", wrong),
        Check("second", fails),
        Check("third", wrong, lambda _: "runs only on CUDA, not on cpu"),
        Check("last", lambda _: 0.5),
    ]
    monkeypatch.setattr(right, "checks", lambda: checks)
    monkeypatch.setattr(right, "this_device", lambda: CPU)

    found: list[tuple[str, float | str]] = []
    with pytest.raises(SystemExit, match=r"wrong: first, second$"):
        found.extend(right.run(True, tmp_path))
    assert dict(found) == {"first": 1.5, "second": "failed: no kernel for this GPU", "third": "needs cuda", "last": 0.5}
