import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import omnitrain as ot
from omnitrain.optim.gradients import clip_gradients, gradient_norm
from omnitrain.parallel.spawn.pool import RankPool

MAX_NORM = 0.5


def with_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> nn.Parameter:
    owner = nn.Parameter(parameter)
    owner.grad = gradient
    return owner


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norm_of(gradients: list[torch.Tensor]) -> float:
    return torch.cat([gradient.double().flatten() for gradient in gradients]).norm().item()


def gradients_on_many_meshes() -> tuple[float, float, list[float]]:
    """The norm, that of the full gradients, and all elements after clipping over those before."""
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    copies = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_fsdp", "ep"))
    places = [
        (line, [Shard(0)], (8, 3)),
        (line, [Shard(0)], (3, 5)),  # uneven: the last rank has nothing
        (line, [Replicate()], (4,)),
        (copies, [Replicate(), Shard(0)], (7, 2)),
        (copies, [Shard(1), Replicate()], (2, 4)),
        (experts, [Shard(0), Shard(0)], (6, 2, 2)),
        (experts, [Shard(1), Shard(0)], (4, 3)),
    ]
    owners = []
    for mesh, placements, shape in places:
        parts = (distribute_tensor(torch.randn(shape), mesh, placements) for _ in range(2))
        owners.append(with_gradient(*parts))
    owners.append(with_gradient(torch.randn(5), torch.randn(5)))
    owners.append(with_gradient(torch.randn(9), torch.randn(9).bfloat16().float()))
    owners.append(with_gradient(distribute_tensor(torch.randn(8), line, [Shard(0)]), None))
    owners.append(nn.Parameter(torch.ones(3), requires_grad=False))
    before = [full(owner.grad).clone() for owner in owners if owner.grad is not None]
    norm = clip_gradients(owners, MAX_NORM).item()
    after = [full(owner.grad) for owner in owners if owner.grad is not None]
    factors = torch.cat([(new / old).flatten() for new, old in zip(after, before, strict=True)])
    return norm, norm_of(before), [factors.min().item(), factors.max().item()]


def test_norm_over_many_meshes_counts_every_element_once(ranks: RankPool) -> None:
    results = ranks.run(gradients_on_many_meshes, timeout_s=30)
    norm, expected, factors = results[0]
    assert abs(norm / expected - 1) < 1e-6
    assert factors == pytest.approx([MAX_NORM / expected] * 2, rel=1e-5)
    assert {result[0] for result in results} == {norm}


def gradient_missing_on_one_rank(rank: int) -> float:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    owner = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    if mesh.get_rank() != rank:
        owner.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
    return gradient_norm([owner]).item()


def test_a_gradient_missing_on_one_rank_counts_as_zero_and_does_not_hang(ranks: RankPool) -> None:
    assert ranks.run(gradient_missing_on_one_rank, 2, timeout_s=30) == [pytest.approx(3**0.5)] * 4


def partial_gradient() -> str:
    mesh = init_device_mesh("cpu", (2,))
    gradient = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(ValueError, match=r"shape \(3,\) is a partial sum"):
        gradient_norm([with_gradient(distribute_tensor(torch.ones(3), mesh, [Replicate()]), gradient)])
    return "refused"


def test_a_partial_sum_has_no_norm(ranks: RankPool) -> None:
    assert ranks.run(partial_gradient, timeout_s=30, world=2) == ["refused"] * 2


class Experts(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.einsum("td,edf->tef", x_TD, weight).tanh().sum()


def trained_on_three_meshes(degrees: dict[str, int] | None) -> float:
    """Norm after a backward of dense layers, experts and a plain scale; ``degrees`` None: in one process."""
    torch.manual_seed(0)
    dense, weight, scale, x_TD = nn.Linear(6, 6), torch.randn(7, 6, 3), nn.Parameter(torch.ones(6)), torch.randn(4, 6)
    if degrees is None:
        experts = Experts(weight)
    else:
        state = ot.init_parallel_state(**degrees)
        experts = Experts(distribute_tensor(weight, state.ep_mesh, [Shard(0)]))
        fully_shard(experts, mesh=state.ep_fsdp_mesh)
        fully_shard(dense, mesh=state.fsdp_mesh)
    hidden_TD = dense(x_TD * scale)
    hidden_TD.square().sum().backward()
    experts(x_TD).backward()
    return gradient_norm([*dense.parameters(), *experts.parameters(), scale]).item()


@pytest.mark.parametrize(
    "degrees", [{"ep_size": 2}, {"ep_size": 4}, {"ep_size": 2, "dp_replicate_size": 2}, {"tp_size": 2}], ids=str
)
def test_norm_of_fsdp_with_experts_on_meshes_of_their_own_is_that_of_one_process(
    ranks: RankPool, degrees: dict[str, int]
) -> None:
    expected = trained_on_three_meshes(None)
    norms = ranks.run(trained_on_three_meshes, degrees, timeout_s=30)
    assert len(set(norms)) == 1
    assert abs(norms[0] / expected - 1) < 1e-6
