"""Experts that compute while rows of others are on their way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omnitrain.data.packing.pack import Pack
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.spawn.pool import RankPool
from tests.parallel import factories
from tests.parallel.expert.test_experts import samples_of
from tests.parallel.laid_out import gradients, laid_out, total

STATES = {"dp4.ep2": {"ep_size": 2}, "dp4.ep4": {"ep_size": 4}, "dp2.sp2.ep4": {"ep_size": 4, "ulysses_size": 2}}
PLAIN: dict[str, Any] = {}


def losses_and_gradients(factory: str, state: dict[str, int], plans: list[dict[str, Any]], accum: int) -> list[Any]:
    """Of every plan: losses of this rank's micro-batches, all of whose forwards come first, and all gradients."""
    found = []
    for plan in plans:
        model = getattr(factories, factory)()
        own = samples_of(model)
        omni = laid_out({**plan, "ep": state["ep_size"]}, state=state, model=build_omni_model(foundation=model).train())
        place = torch.distributed.get_rank() // state.get("ulysses_size", 1)
        losses = [total(omni(Pack.from_samples([own[(place + index) % len(own)]]))) for index in range(accum)]
        for loss in losses:
            loss.backward()
        found.append((torch.stack(losses).detach(), gradients(omni)))
    return found


def check(ranks: RankPool, factory: str, layout: str, plans: list[dict[str, Any]], accum: int = 2) -> None:
    """Every plan gives the bits of the plain order."""
    for of_rank in ranks.run(losses_and_gradients, factory, STATES[layout], [PLAIN, *plans], accum, timeout_s=300):
        (losses, expected), *others = of_rank
        for plan, (other_losses, found) in zip(plans, others, strict=True):
            assert torch.equal(losses, other_losses), plan
            assert found.keys() == expected.keys()
            assert [name for name, gradient in found.items() if not torch.equal(gradient, expected[name])] == [], plan


def test_overlap_changes_no_bit(ranks: RankPool) -> None:
    check(ranks, "moe_of_32_experts", "dp4.ep2", [{"experts": {"chunks": 3}}])


@pytest.mark.second
def test_overlap_with_shared_experts_and_recompute_changes_no_bit(ranks: RankPool) -> None:
    plan = {"experts": {"chunks": 4, "delay_wgrad": True}, "memory": {"recompute": "full", "offload": ["activations"]}}
    check(ranks, "moe_with_shared_experts", "dp2.sp2.ep4", [plan])


@pytest.mark.second
def test_parts_that_are_computed_again_and_tensors_in_host_memory_change_no_bit(ranks: RankPool) -> None:
    memory = {"recompute": "parts", "offload": ["dispatched_rows", "mlp_input"]}
    plan = {"experts": {"chunks": 4, "delay_wgrad": True}, "memory": memory}
    check(ranks, "moe_with_shared_experts", "dp4.ep4", [plan])


@pytest.mark.slow
@pytest.mark.parametrize("layout", STATES)
@pytest.mark.parametrize("factory", ["moe_of_32_experts", "moe_with_shared_experts"])
def test_no_mixture_of_overlap_delay_recompute_and_offload_changes_a_bit(
    ranks: RankPool, factory: str, layout: str
) -> None:
    plans = [
        {
            "experts": {"chunks": chunks, "delay_wgrad": delay},
            "memory": {"recompute": recompute, "offload": ["activations"] * offload},
        }
        for chunks in range(1, 9)
        for delay in (False, True)
        for recompute in ("none", "full")
        for offload in (False, True)
    ]
    check(ranks, factory, layout, plans, accum=4)
