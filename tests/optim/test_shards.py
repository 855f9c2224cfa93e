from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from omnitrain.optim.adamw import ShardedAdamW
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.run import ShardedSGD

UPDATES = {
    "AdamW": (ShardedAdamW, torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "SGD": (ShardedSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def weights_and_states(name: str, *, is_sharded: bool) -> list[torch.Tensor]:
    """After three steps, whole. A shard is empty, and a gradient is a sum not yet made; torch takes no mixture."""
    ours, torchs, options = UPDATES[name]
    torch.manual_seed(0)
    mesh, placements = init_device_mesh("cpu", (2,)), ([Shard(0)], [Shard(1)], [Replicate()], [Shard(0)])
    wholes = [torch.randn(size) for size in ((5, 3), (4, 1), (6,), (2, 2))]
    parameters = [nn.Parameter(distribute_tensor(w, mesh, p)) for w, p in zip(wholes, placements, strict=True)]
    plain = nn.Parameter(torch.ones(3))
    groups = [{"params": [*parameters, plain]}] if is_sharded else [{"params": parameters}, {"params": [plain]}]
    optimizer = (ours if is_sharded else torchs)(groups, **options)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.cos(parameter.detach() * (step + 1))
        summands = DTensor.from_local(torch.full((2, 2), 0.5), mesh, [Partial()])
        parameters[-1].grad = summands if is_sharded else summands.redistribute(placements=[Shard(0)])
        plain.grad = torch.full((3,), 0.1)
        optimizer.step()
    states = [value for p in parameters for key, value in optimizer.state[p].items() if key != "step"]
    tensors = [*parameters, plain, *states]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in map(torch.Tensor.detach, tensors)]


def test_the_update_of_shards_is_the_update_of_torch(ranks: RankPool) -> None:
    for name in UPDATES:
        ours, others = ranks.run(compared, name, timeout_s=60, world=2)
        assert ours == others == (True, 13 if name == "AdamW" else 5)


def compared(name: str) -> tuple[bool, int]:
    ours, theirs = (weights_and_states(name, is_sharded=sharded) for sharded in (True, False))
    if name == "SGD":  # its momentum is a plain shard: compare what it makes of the weights
        ours, theirs = ours[:5], theirs[:5]
    return all(map(torch.equal, ours, theirs)), len(ours)


@pytest.mark.parametrize("name", UPDATES)
def test_a_plain_model_trains_as_with_torch(name: str) -> None:
    found = []
    for make in UPDATES[name][:2]:
        parameter = nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = make([parameter], **UPDATES[name][2])
        for _ in range(3):
            parameter.grad = parameter.detach().cos()
            optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(*found)
