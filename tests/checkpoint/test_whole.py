from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from omnitrain.checkpoint.whole import (
    OptimizerState,
    load_whole_optimizer_state,
    whole_optimizer_state,
    whole_weights,
)
from omnitrain.parallel.ranks import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.tensor.apply import cut_tensors


class Tied(nn.Module):
    """Embedding and head are one parameter; ``unused`` never gets a gradient; ``frozen`` is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.unused, self.frozen = nn.Linear(5, 5), nn.LayerNorm(5).requires_grad_(False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.embed(ids)))


def tied_model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=True)


def train(model: Tied, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.arange(7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def continued_on_ranks(weights: dict[str, torch.Tensor], state: OptimizerState) -> tuple[dict, OptimizerState]:
    """Weights and state loaded, taken again at once."""
    model = tied_model()
    model.load_state_dict(weights)
    fully_shard(model)
    optimizer = optimizer_of(model)
    load_whole_optimizer_state(model, optimizer, state)
    keep = torch.distributed.get_rank() == 0
    return whole_weights(model, keep=keep), whole_optimizer_state(model, optimizer)


def test_a_continued_run_updates_bitwise_as_the_uninterrupted_one() -> None:
    model, restored = tied_model(), tied_model()
    optimizer, other = optimizer_of(model), optimizer_of(restored)
    train(model, optimizer, 2)
    state = copy.deepcopy(whole_optimizer_state(model, optimizer))
    assert set(state["state"]) == {"embed.weight"}  # the unused have none, before and after
    restored.load_state_dict(whole_weights(model))
    load_whole_optimizer_state(restored, other, state)
    train(model, optimizer, 1)
    train(restored, other, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), restored.parameters(), strict=True))
    assert other.state.keys() == {restored.embed.weight}


def test_state_goes_onto_ranks_and_comes_back_whole_and_bitwise(ranks: RankPool) -> None:
    model = tied_model()
    optimizer = optimizer_of(model)
    train(model, optimizer, 2)
    weights, state = whole_weights(model), copy.deepcopy(whole_optimizer_state(model, optimizer))
    (got, got_state), (nothing, none) = ranks.run(continued_on_ranks, weights, state, timeout_s=60, world=2)
    assert not nothing and not none.get("state")
    assert got.keys() == weights.keys() and all(torch.equal(got[name], weights[name]) for name in weights)
    assert got["head.weight"].data_ptr() == got["embed.weight"].data_ptr()
    assert got_state["state"].keys() == state["state"].keys()
    for name, tensors in state["state"].items():
        assert all(torch.equal(got_state["state"][name][key], value) for key, value in tensors.items())


def test_an_optimizer_that_has_not_stepped_is_left_alone() -> None:
    model = tied_model()
    optimizer = optimizer_of(model)
    assert whole_optimizer_state(model, optimizer)["state"] == {} and not optimizer.state


class Narrow(nn.Module):
    """Matrices of which two meshes cut the same dim, unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


def narrow_model() -> Narrow:
    torch.manual_seed(0)
    return Narrow()


def cut_twice(state: OptimizerState) -> tuple[dict, OptimizerState]:
    """Weights and loaded state of a model that tensor parallelism cuts and FSDP shards."""
    model = narrow_model()
    layout = init_parallel_state(tp_size=2)
    cut_tensors(model, {"up": "colwise", "down": "rowwise"}, layout.tp_mesh)
    fully_shard(model, mesh=layout.fsdp_mesh)
    optimizer = optimizer_of(model)
    load_whole_optimizer_state(model, optimizer, state)
    return whole_weights(model), whole_optimizer_state(model, optimizer)


def test_what_tensor_parallelism_and_sharding_cut_goes_onto_ranks_and_comes_back_whole(ranks: RankPool) -> None:
    model = narrow_model()
    optimizer = optimizer_of(model)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    state = copy.deepcopy(whole_optimizer_state(model, optimizer))
    results = ranks.run(cut_twice, state, timeout_s=60, world=4)
    for name, weight in narrow_model().named_parameters():
        assert torch.equal(results[0][0][name], weight)
        moments = results[0][1]["state"][name]
        assert all(torch.equal(moments[key], value) for key, value in state["state"][name].items())
