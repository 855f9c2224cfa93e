"""What of a block with experts waits for its backward, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.models.discovery import discover
from omnitrain.models.hf.samples import to_samples
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.memory.offload import ActivationOffload
from tests.parallel import factories
from tests.parallel.expert.test_experts import samples_of
from tests.parallel.laid_out import gradients, laid_out, total
from tests.peaks import peak_bytes

OURS = {"experts": {"rows": 1_000_000}}  # the products of omnitrain, all at once
LAYERS, HIDDEN, INNER, TOP_K, ITEMSIZE = 2, 64, 32, 2, 4


def stepped(plan: Mapping[str, Any]) -> tuple[ot.OmniModel, int, int, dict[str, Tensor]]:
    """After a step: the model, tokens, bytes that waited for the backward (weights too), gradients."""
    torch.manual_seed(0)
    model = factories.qwen3_moe()
    pack = Pack.from_samples(samples_of(model))
    omni = laid_out(plan, model=build_omni_model(foundation=model).train())
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = total(omni(pack))
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    return omni, pack.input_ids.numel(), num_bytes, gradients(omni)


def test_what_lies_between_the_products_of_experts_is_computed_again() -> None:
    _, tokens, plain, expected = stepped(OURS)
    _, _, kept, found = stepped({**OURS, "memory": {"recompute": {"parts": ["expert_activation"]}}})
    rows = tokens * TOP_K
    assert plain - kept >= LAYERS * rows * INNER * ITEMSIZE  # at least the second product's input
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("part", ["attention", "router"])
def test_of_attention_and_routers_only_the_inputs_wait(part: str) -> None:
    _, _, plain, expected = stepped(OURS)
    _, _, kept, found = stepped({**OURS, "memory": {"recompute": {"parts": [part]}}})
    assert kept < plain
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_named_tensors_wait_in_host_memory() -> None:
    _, tokens, _, expected = stepped(OURS)
    rows_of = {"dispatched_rows": TOP_K, "mlp_input": 1}
    for names in (["dispatched_rows"], ["mlp_input"], ["dispatched_rows", "mlp_input"]):
        omni, _, _, found = stepped({**OURS, "memory": {"offload": names}})
        offload = ot.parallel.layout_of(omni).components["foundation"].activations
        assert offload.num_bytes == LAYERS * tokens * sum(rows_of[name] for name in names) * HIDDEN * ITEMSIZE
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def peak_of_a_step(plan: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes at once in a step of six layers, the second one; and those of a row of all of its tokens."""
    torch.manual_seed(0)
    model = factories.qwen3_moe_with(num_hidden_layers=6)
    ids = torch.randint(3, 180, (1, 300))
    pack = Pack.from_samples(to_samples(discover(model), [{"input_ids": ids, "labels": ids}]))
    omni = laid_out({**OURS, **plan}, model=build_omni_model(foundation=model).train(), enable_full_shard=False)
    total(omni(pack)).backward()
    omni.zero_grad()
    return peak_bytes(lambda: total(omni(pack)).backward()), 6 * ids.numel() * HIDDEN * ITEMSIZE


@pytest.mark.second
def test_the_peak_falls_by_what_waits_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is numpy's here, which is not seen among torch's tensors."""
    monkeypatch.setattr(ActivationOffload, "out", lambda _, tensor: tensor.detach().numpy().copy())
    monkeypatch.setattr(ActivationOffload, "back", lambda _, host: (torch.from_numpy(host).clone(), None))
    each, both = [(["dispatched_rows"], TOP_K), (["mlp_input"], 1)], (["dispatched_rows", "mlp_input"], TOP_K + 1)
    for beside, offloaded in (({}, [*each, both]), ({"recompute": "parts"}, [both])):
        plain, of_rows = peak_of_a_step({"memory": beside})
        for names, rows in offloaded:
            peak, _ = peak_of_a_step({"memory": {**beside, "offload": names}})
            assert plain - peak == pytest.approx(rows * of_rows, rel=0.1), (names, beside)


def test_weights_that_a_part_of_a_block_gathers_for_its_call_stay_on_the_device() -> None:
    ot.init_parallel_state()
    mesh = init_device_mesh("cpu", (1,))
    block = nn.Sequential(nn.Linear(64, 64, bias=False))
    gathered = nn.Parameter(DTensor.from_local(torch.randn(64, 64), mesh, [Shard(0)], run_check=False))
    block[0].register_forward_pre_hook(lambda part, _: part._parameters.update(weight=gathered))
    block[0].forward = lambda x: x @ block[0].weight.to_local().t()
    offload = ActivationOffload(torch.device("cpu"))
    offload.attach(block)
    rows = torch.randn(32, 64, requires_grad=True)
    block(rows).sum().backward()
    assert offload.num_bytes == rows.nbytes and rows.grad is not None
