from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from omnitrain.models.omni.named_parameters import hidden_matrices
from omnitrain.optim import muon
from omnitrain.optim.adamw import local_shard
from omnitrain.optim.build import build_optimizer
from omnitrain.optim.muon import MuonWithAdamW, orthogonalized
from omnitrain.optim.offload import OffloadedOptimizer
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.tensor.apply import shard_matrices
from omnitrain.recipe import Optimizer
from omnitrain.train.lr_groups import matrices_of
from tests.parallel.factories import qwen3_moe_with_adapters
from tests.tiny import tiny_model
from tests.whole import whole_tensors

SHAPES = ((6, 4), (6, 4), (4, 6), (5, 3), (6, 4), (4, 3, 5), (3, 5, 2))  # the last two: experts
SETTINGS = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True, "momentum": 0.9}


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def trained(parameters: list[nn.Parameter], plain: nn.Parameter) -> list[Tensor]:
    """Three steps; the vector is AdamW's."""
    groups = [{"params": parameters, "muon": True}, {"params": [plain], "muon": False}]
    optimizer = MuonWithAdamW([group | {"weight_decay": 0.1} for group in groups], **SETTINGS)
    for step in range(3):
        for parameter in (*parameters, plain):
            parameter.grad = torch.cos(parameter.detach() * (step + 1))
        optimizer.step()
    named = {str(i): p for i, p in enumerate(parameters)} | {
        f"momentum {i}": optimizer.state[p]["momentum_buffer"] for i, p in enumerate(parameters)
    }
    assert optimizer.state[plain].keys() == {"step", "exp_avg", "exp_avg_sq"}
    return [*whole_tensors(named).values(), plain.detach()]


def test_a_step_is_that_of_torch_and_of_adamw_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch orthogonalizes in bf16: one matrix at a time, without experts."""
    in_bf16 = muon.orthogonalized

    def as_torch(matrices: Tensor) -> Tensor:
        return torch.stack(
            [_zeropower_via_newtonschulz(one, muon._COEFFICIENTS, muon._STEPS, muon._EPS).float() for one in matrices]
        )

    monkeypatch.setattr(muon, "orthogonalized", as_torch)
    ours = trained([nn.Parameter(weight) for weight in weights()], nn.Parameter(torch.ones(3)))
    flat = [nn.Parameter(one) for weight in weights() for one in (weight if weight.ndim == 3 else [weight])]
    plain = nn.Parameter(torch.ones(3))
    torchs = torch.optim.Muon(flat, lr=0.1, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([plain], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    for step in range(3):
        for parameter in (*flat, plain):
            parameter.grad = torch.cos(parameter.detach() * (step + 1))
        torchs.step()
        adamw.step()
    found = [one for weight in ours[: len(SHAPES)] for one in (weight if weight.ndim == 3 else [weight])]
    assert all(map(torch.equal, found, flat)) and torch.equal(ours[-1], plain)
    random = torch.randn(3, 20, 7)
    torch.testing.assert_close(in_bf16(random), as_torch(random), atol=0.05, rtol=0.05)


def test_singular_values_are_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((2, 8, 8), (3, 5, 40), (40, 5)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)))
        assert values.min() > 0.5 and values.max() < 1.3


def on_mesh(shape: tuple[int, ...], names: tuple[str, ...], placements: list[list[object]]) -> bool:
    """Whether matrices in these placements (one after the other) train as on one process."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    parameters = [
        nn.Parameter(distribute_tensor(weight, mesh, placements[i % len(placements)]))
        for i, weight in enumerate(weights())
    ]
    found = trained(parameters, nn.Parameter(torch.ones(3)))
    alone = trained([nn.Parameter(weight) for weight in weights()], nn.Parameter(torch.ones(3)))
    difference = max(float((one - other).abs().max()) for one, other in zip(found, alone, strict=True))
    assert difference < 1e-5, difference
    return True


def in_all_placements() -> bool:
    """Of two ranks; shards are uneven, and some are empty."""
    one = [[Shard(0)], [Shard(1)], [Replicate()]]
    return all(on_mesh((2,), ("shard",), one[i:] + one[:i]) for i in range(3))


def with_replicas_and_two_axes() -> bool:
    """HSDP; expert parallelism with FSDP by experts, and by rows; two axes that shard one matrix."""
    axes = [[Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)]]
    return all(on_mesh((2, 2), ("replicate", "shard"), axes[i:] + axes[:i]) for i in range(3))


def test_sharded_matrices_train_as_whole_ones(ranks: RankPool) -> None:
    assert all(ranks.run(in_all_placements, timeout_s=60, world=2))


@pytest.mark.slow
def test_matrices_on_two_axes_train_as_whole_ones(ranks: RankPool) -> None:
    assert all(ranks.run(with_replicas_and_two_axes, timeout_s=60, world=4))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 6, bias=False), nn.Linear(6, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def updated(model: nn.Module) -> dict[str, Tensor]:
    groups = [{"params": list(model.parameters()), "muon": True, "weight_decay": 0.1}]
    optimizer = MuonWithAdamW(groups, **SETTINGS)
    for _ in range(2):
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_tensors(model.state_dict(keep_vars=True))


def cut_twice() -> float:
    """Tensor parallelism cuts it, then FSDP shards it: of one matrix, both cut the same dim."""
    torch.manual_seed(0)
    model, alone = Wide(), Wide()
    alone.load_state_dict(model.state_dict())
    layout = init_parallel_state(tp_size=2)
    shard_matrices(model, {"up": "colwise", "down": "rowwise"}, layout.tp_mesh)
    fully_shard(model, mesh=layout.fsdp_mesh)
    for one in (model, alone):
        for parameter in one.parameters():
            parameter.grad = torch.zeros_like(parameter)
            local_shard(parameter.grad).copy_(torch.cos(local_shard(parameter.detach())))
        MuonWithAdamW([{"params": list(one.parameters()), "muon": True, "weight_decay": 0.1}], **SETTINGS).step()
    found = whole_tensors(model.state_dict(keep_vars=True))
    return max(float((found[name] - weight).abs().max()) for name, weight in alone.state_dict().items())


@pytest.mark.slow
def test_matrices_that_tensor_parallelism_and_fsdp_cut_train_as_whole_ones(ranks: RankPool) -> None:
    assert max(ranks.run(cut_twice, timeout_s=60, world=4)) < 1e-5


def test_a_copy_in_host_memory_is_updated_alike() -> None:
    torch.manual_seed(0)
    plain, low = Wide(), Wide()
    low.load_state_dict(plain.state_dict())
    wanted = updated(plain)
    groups = [{"params": list(low.parameters()), "muon": True, "weight_decay": 0.1}]
    optimizer = OffloadedOptimizer(lambda given: MuonWithAdamW(given, **SETTINGS), groups, list(low.parameters()))
    for _ in range(2):
        low(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(weight, wanted[name]) for name, weight in low.state_dict().items())


def test_embeddings_heads_norms_convolutions_and_adapters_stay_with_adamw() -> None:
    model = tiny_model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {names[parameter] for parameter in hidden_matrices(model)}
    kept = {name for name, p in model.named_parameters() if p.ndim >= 2 and p.requires_grad} - found
    assert {"foundation.model.layers.0.mlp.up_proj.weight", "foundation.model.layers.1.self_attn.q_proj.weight"} < found
    assert not any(word in name for name in found for word in ("embed", "norm", "conv", "decoder.", "head"))
    assert kept and all(any(word in name for word in ("embed", "conv", "decoder.", "time")) for name in kept), kept
    adapted = qwen3_moe_with_adapters()
    with pytest.raises(ValueError, match="no matrix of a hidden layer trains"):
        matrices_of(adapted, Optimizer(kind="muon"))


def test_all_experts_of_a_layer_are_matrices_and_decay_as_their_component_says() -> None:
    model = qwen3_moe_with_adapters()
    for parameter in model.parameters():
        parameter.requires_grad_()
    experts = {name: p for name, p in model.named_parameters() if p.ndim == 3 and "lora" not in name}
    assert experts and set(experts.values()) <= hidden_matrices(model)
    settings = Optimizer(kind="muon", weight_decay=0.1)
    decays = dict.fromkeys(experts.values(), 0.3)
    optimizer = build_optimizer(model, settings, decays=decays, matrices=matrices_of(model, settings))
    of = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert all(of[p]["weight_decay"] == 0.3 and of[p]["muon"] for p in experts.values())
    assert {of[p]["weight_decay"] for p in model.parameters() if p.ndim < 2} == {0.0}
