"""Kernels of other packages: named, and not run by a check on the CPU."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from omnitrain.models.contract.check import check_contract
from omnitrain.models.hf.hub_kernels import Kernel, kernels_of, torch_kernels
from omnitrain.models.hf.load import foundation_class
from tests.families import FAMILIES


@pytest.fixture
def device_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where fla is installed: its kernel takes offsets, and no tensor on the CPU."""

    def chunk_gated_delta_rule(*args: object, cu_seqlens: object = None, **kwargs: object) -> None:
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

    wrapper = modeling_qwen3_next.torch_chunk_gated_delta_rule
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
    changes = {
        "implementation": chunk_gated_delta_rule,
        "is_new_implementation": True,
        "applicable_params": tuple(inspect.signature(chunk_gated_delta_rule).parameters),
    }
    for name, value in changes.items():
        monkeypatch.setattr(cells[name], "cell_contents", value)


def test_each_kernel_is_named_with_the_package_that_runs_it(device_kernel: None) -> None:
    config = FAMILIES["qwen3_next"]()
    model = foundation_class(config)(config)
    rule = Kernel("chunk_gated_delta_rule", "fla", is_used=True)
    assert rule in kernels_of(model) and str(rule) == "chunk_gated_delta_rule: fla"
    assert "fused_recurrent_gated_delta_rule: torch" in map(str, kernels_of(model))
    with torch_kernels(model):
        assert not any(kernel.is_used for kernel in kernels_of(model))
        assert torch.isfinite(model(input_ids=torch.arange(5)[None]).logits).all()
    assert rule in kernels_of(model)
    with pytest.raises(ValueError, match="Triton"):
        model(input_ids=torch.arange(5)[None])


def test_a_model_whose_kernel_runs_on_no_cpu_passes_the_check_and_the_kernel_is_stated(device_kernel: None) -> None:
    config = FAMILIES["qwen3_next"]()
    contract = check_contract(foundation_class(config), config)
    facts = {finding.check: finding.fact for finding in contract.findings}
    assert not contract.refusals and contract.packs and contract.segmented
    assert "chunk_gated_delta_rule: fla" in facts["kernels"]
    assert facts["kernels"].endswith("the check ran torch code instead")


def test_a_model_without_such_kernels_has_none() -> None:
    config = FAMILIES["qwen3"]()
    assert kernels_of(foundation_class(config)(config)) == ()
