"""Each style of the table, on two ranks: what a module gives whole, and the gradients of every parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import omnitrain as ot
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.tensor.apply import add_up_over_tp, shard_matrices
from omnitrain.parallel.tensor.styles import STYLES


class Parts(nn.Module):
    """Bare matrices, of which the first is cut by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4, 8))
        self.per_column = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.first).tanh() * self.per_column, self.second)


class Experts(nn.Module):
    """Fused matrices of three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 4))
        self.down_proj = nn.Parameter(torch.randn(3, 4, 4))
        self.identity = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("td,efd->tef", self.identity(x), self.gate_up_proj).chunk(2, -1)
        return torch.einsum("tef,edf->td", gate.sigmoid() * up, self.down_proj)


class Layer(nn.Module):
    """Heads of width 2 between two matrices, with a norm and a row that all heads share; fused matrices beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, padding_idx=7)
        self.into_heads, self.norm, self.out_of_heads = nn.Linear(4, 8), nn.RMSNorm(2), nn.Linear(8, 4)
        self.to_all_heads = nn.Linear(4, 2)
        self.fused, self.out = nn.Linear(4, 12), nn.Linear(6, 4)
        self.parts, self.experts = Parts(), Experts()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        heads = self.norm(self.into_heads(x).unflatten(-1, (-1, 2))) + self.to_all_heads(x)[:, None]
        x = x + self.out_of_heads(heads.tanh().flatten(-2))
        gate, up = self.fused(x).chunk(2, -1)
        return self.experts(self.parts(x + self.out(gate.sigmoid() * up)))


HEADS = {"into_heads": "colwise", "out_of_heads": "rowwise"}
PARTS = {"parts.first": "colwise", "parts.second": "rowwise", "parts.per_column": "colwise", "parts": "all_reduce"}
CASES = {
    "colwise": HEADS,
    "rowwise": HEADS,
    "replicated_with_grad_allreduce": {**HEADS, "norm": "replicated_with_grad_allreduce"},
    "mla_kv_a_proj": {**HEADS, "to_all_heads": "mla_kv_a_proj"},
    "colwise_gather_output": {"fused": "colwise_gather_output", "into_heads": "colwise_gather_output"},
    "colwise_rep": {"fused": "colwise_rep"},
    "rowwise_split_input": {"out": "rowwise_split_input", "out_of_heads": "rowwise_split_input"},
    "rowwise_rep": {"fused": "colwise_rep", "out": "rowwise_rep"},
    "embedding_rowwise": {"table": "embedding_rowwise"},
    "embedding_colwise": {"table": "embedding_colwise"},
    "all_reduce": PARTS,
    "local_params": {**PARTS, "experts": "local_params"},
    "replicate": {**HEADS, "table": "replicate"},
    "moe_tp_experts": {**HEADS, "experts": "moe_tp_experts"},
    "packed_colwise": {**HEADS, "experts.gate_up_proj": "packed_colwise"},
    "packed_rowwise": {**HEADS, "experts.down_proj": "packed_rowwise"},
    "moe_identity_expert": {**HEADS, "experts.identity": "moe_identity_expert"},
}


def trained(layer: nn.Module, share: float) -> dict[str, Tensor]:
    ids = torch.tensor([0, 9, 7, 3, 3, 5, 7])
    loss = (layer(ids) * torch.linspace(-1, 1, 28).view(7, 4)).sum()
    (loss * share).backward()
    return {"loss": loss.detach()}


def errors(styles: dict[str, str]) -> tuple[dict[str, float], set[str]]:
    """Relative errors against the whole layer, and the names of the parameters that are cut."""
    torch.manual_seed(0)
    whole, layer = Layer().double(), Layer().double()
    layer.load_state_dict(whole.state_dict())
    state = ot.init_parallel_state(tp_size=2)
    shard_matrices(layer, styles, state.tp_mesh)
    found = trained(layer, 1.0 if state.tp_rank == 0 else 0.0)
    add_up_over_tp(layer.parameters(), state)
    expected: dict[str, Any] = trained(whole, 1.0) | {name: p.grad for name, p in whole.named_parameters()}
    found |= {name: p.grad.full_tensor() if isinstance(p, DTensor) else p.grad for name, p in layer.named_parameters()}
    difference = {name: float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in expected.items()}
    return difference, {name for name, p in layer.named_parameters() if isinstance(p, DTensor)}


@pytest.mark.parametrize("style", STYLES)
def test_a_layer_cut_in_a_style_gives_what_it_gives_whole(ranks: RankPool, style: str) -> None:
    for difference, cut in ranks.run(errors, CASES[style], timeout_s=60, world=2):
        assert max(difference.values()) < 1e-12, difference
        assert bool(cut) == any(STYLES[name].cut for name in CASES[style].values())


def norm_gradients() -> list[float]:
    """Of the norm between the heads, on this rank: before and after they are added up, relative to the whole one's."""
    torch.manual_seed(0)
    whole, layer = Layer().double(), Layer().double()
    layer.load_state_dict(whole.state_dict())
    state = ot.init_parallel_state(tp_size=2)
    shard_matrices(layer, HEADS, state.tp_mesh)
    trained(layer, 1.0 if state.tp_rank == 0 else 0.0)
    trained(whole, 1.0)
    size = whole.norm.weight.grad.norm()
    before = float((layer.norm.weight.grad - whole.norm.weight.grad).norm() / size)
    add_up_over_tp(layer.parameters(), state)
    return [before, float((layer.norm.weight.grad - whole.norm.weight.grad).norm() / size)]


def test_the_gradient_of_a_norm_of_heads_is_partial_and_exact_on_every_rank_once_added_up(ranks: RankPool) -> None:
    for before, after in ranks.run(norm_gradients, timeout_s=60, world=2):
        assert before > 0.1 and after < 1e-12


def dropped() -> Tensor:
    """What a rank computes with dropout in its heads and behind them, drawn as the trainer draws: by data rank."""
    torch.manual_seed(0)
    layer = Layer()
    layer.norm = nn.Sequential(layer.norm, nn.Dropout(0.3))
    layer.experts = nn.Sequential(nn.Dropout(0.3), layer.experts)
    state = ot.init_parallel_state(tp_size=2)
    shard_matrices(layer, HEADS, state.tp_mesh)
    torch.manual_seed(state.rank_in("loss"))
    return layer(torch.arange(9)).detach()


def test_dropout_draws_the_same_where_ranks_compute_the_same(ranks: RankPool) -> None:
    one, other = ranks.run(dropped, timeout_s=60, world=2)
    assert torch.equal(one, other)
