"""Training with a held-out loss and answers between its steps is the same training, to the bit."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import omnitrain as ot
from omnitrain.parallel.spawn.pool import RankPool
from tests.parallel.schedule.test_inference_on_ranks import share_on
from tests.parallel.schedule.test_inference_on_stages import any_to_any


class Trained(NamedTuple):
    """Of a rank: its part of the loss of each step, its shards afterwards, and random numbers drawn at the end."""

    losses: list[float]
    weights: dict[str, Tensor]
    drawn: list[float]


def trained(layout: str, *, evaluates: bool) -> Trained:
    torch.manual_seed(5)
    model, processor, prompts, packs = any_to_any()
    share = share_on(model.train(), layout)
    own, asked = ([], []) if share is None else (packs[share[0] :: share[1]], prompts[share[0] :: share[1]])
    plan_step = ot.step_planner(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad and not p.is_meta], lr=0.1)
    losses = []
    for _ in range(2):
        if evaluates:
            ot.heldout_loss(model.eval(), own)
            model.train()
            ot.generate(model, processor, asked, max_new_tokens=3)
        losses.append(ot.accumulate_gradients(model, plan_step(own)).item())
        ot.clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: _local(weight.detach()).clone() for name, weight in model.named_parameters() if not weight.is_meta}
    return Trained(losses, weights, torch.rand(3).tolist())


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def both_ways(layout: str) -> tuple[Trained, Trained]:
    return trained(layout, evaluates=False), trained(layout, evaluates=True)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("vision1+dp2", marks=pytest.mark.second),
        "pp2",
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("dp2", "hsdp2x2", "tp2", "sp2", "cp2")),
    ],
)
def test_evaluations_change_neither_weights_nor_random_numbers(ranks: RankPool, layout: str) -> None:
    for without, between in ranks.run(both_ways, layout, timeout_s=120, world=ot.recipe.parse_layout(layout).num_ranks):
        assert (between.losses, between.drawn) == (without.losses, without.drawn)
        assert without.weights.keys() == between.weights.keys()
        assert all(torch.equal(weight, between.weights[name]) for name, weight in without.weights.items())


def sums_in_later_groups(layout: str) -> tuple[float, float]:
    """Of all ranks, in a group made after a held-out loss, and in one made after answers."""
    model, processor, prompts, packs = any_to_any()
    share = share_on(model, layout)
    own, asked = ([], []) if share is None else (packs[share[0] :: share[1]], prompts[share[0] :: share[1]])
    ot.heldout_loss(model.eval(), own)
    after_losses = _sum_of_ones()
    ot.generate(model, processor, asked, max_new_tokens=2)
    return after_losses, _sum_of_ones()


def _sum_of_ones() -> float:
    total = torch.ones(())
    dist.all_reduce(total, group=dist.new_group())
    return total.item()


@pytest.mark.parametrize("layout", ["vision1+pp2", pytest.param("vision1+dp2", marks=pytest.mark.slow)])
def test_all_ranks_make_the_groups_of_an_evaluation(ranks: RankPool, layout: str) -> None:
    """Ranks that had made others would wait for each other in the next group, whose name has their number."""
    assert ranks.run(sums_in_later_groups, layout, timeout_s=60, world=3) == [(3.0, 3.0)] * 3


def test_generation_restores_the_mode_of_every_module() -> None:
    model, processor, prompts, _ = any_to_any()
    model.train().image_encoder.eval()
    ot.generate(model, processor, prompts[:1], max_new_tokens=1)
    assert (model.training, model.image_encoder.training, model.audio_encoder.training) == (True, False, True)
