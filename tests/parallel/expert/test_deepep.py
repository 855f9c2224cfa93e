"""DeepEP as what moves rows of experts, by a stand-in that does what its documentation says."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from omnitrain.data.packing.pack import Pack
from omnitrain.models.omni.build import build_omni_model
from omnitrain.ops.experts.install import set_experts
from omnitrain.ops.experts.weights import experts_in
from omnitrain.parallel.expert.deepep import DeepEpDispatcher, deepep_problem, open_deepep
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.spawn.pool import RankPool
from tests.parallel import factories
from tests.parallel.expert import deepep_stand_in
from tests.parallel.expert.test_experts import samples_of
from tests.parallel.laid_out import gradients, laid_out, total


def trained(factory: str, by_deepep: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Loss and gradients of a pack, which is longer on the second rank; bytes sent by the first layer."""
    model = getattr(factories, factory)()
    own = samples_of(model)
    plan = {"ep": 2, "memory": {"recompute": "full"}}
    omni = laid_out(plan, state={"ep_size": 2}, model=build_omni_model(foundation=model).train())
    if by_deepep:
        buffer = deepep_stand_in.Buffer(layout_of(omni).state.ep_mesh.get_group())
        for _, experts in experts_in(omni):
            set_experts(experts, dispatcher=DeepEpDispatcher(buffer))
    rank = torch.distributed.get_rank()
    loss = total(omni(Pack.from_samples(own[rank : 2 * rank + 1])))
    loss.backward()
    return (
        loss.detach(),
        gradients(omni),
        sum(experts._expert_settings.dispatcher.bytes_sent for _, experts in experts_in(omni)),
    )


def both(factory: str) -> tuple[Any, Any]:
    return trained(factory, by_deepep=False), trained(factory, by_deepep=True)


@pytest.mark.parametrize("factory", ["qwen3_moe", "lopsided_moe"])
def test_rows_by_deepep_give_the_same_loss_and_gradients(ranks: RankPool, factory: str) -> None:
    results = ranks.run(both, factory, timeout_s=60, world=2)
    for (loss, expected, _), (found_loss, found, _) in results:
        torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert float((gradient - expected[name]).abs().max()) <= 1e-5 * float(expected[name].abs().max()), name
    sent, by_deepep = ([rank[which][2] for rank in results] for which in (0, 1))
    assert 0 < sum(by_deepep) < sum(sent)  # a token goes once to a rank, however many of its experts are there


def opened(broken_rank: int | None) -> tuple[bool, str]:
    if broken_rank is not None:
        deepep_stand_in.Buffer.broken_rank = broken_rank
        sys.modules["deep_ep"] = deepep_stand_in
    try:
        buffer, problem = open_deepep(torch.distributed.group.WORLD, 64, torch.device("cpu"))
    finally:
        sys.modules.pop("deep_ep", None)
    return buffer is not None, problem


def test_it_is_used_where_an_exchange_comes_back_right_on_all_ranks(ranks: RankPool) -> None:
    assert ranks.run(opened, -1, timeout_s=30, world=2) == [(True, "")] * 2
    for is_open, problem in ranks.run(opened, 1, timeout_s=30, world=2):
        assert not is_open and "returned wrong values" in problem
    assert (
        ranks.run(opened, None, timeout_s=30, world=2)
        == [(False, "ModuleNotFoundError: No module named 'deep_ep'")] * 2
    )


def test_where_it_cannot_run_is_known_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert deepep_problem("cuda", "bfloat16") == "deep_ep is not installed"
    monkeypatch.setattr("omnitrain.parallel.expert.deepep.find_spec", lambda name: name)
    assert deepep_problem("cpu", "bfloat16") == "DeepEP runs on CUDA, not on cpu"
    assert "computes in float32" in deepep_problem("cuda", "float32") and not deepep_problem("cuda", "bfloat16")
