"""A unit of one rank moves its parameters and gradients as often as it must, and computes what any unit does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from omnitrain.parallel.fsdp.shard import skip_copy_in_out
from omnitrain.parallel.spawn.pool import RankPool

WIDTH = 64
WEIGHTS = WIDTH * WIDTH


class Moves(TorchDispatchMode):
    """How often as many numbers as there are weights were copied, with a cast into another tensor or without."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy") and made.numel() == WEIGHTS:
            self.found[name] += made is not args[-1]  # a tensor is not copied to itself
        return made


def two_backwards(spares: bool) -> tuple[Counter[str], list[list[float]]]:
    """Of a linear layer: what was moved in the first one, and the gradient behind each."""
    torch.manual_seed(0)
    unit = fully_shard(
        nn.Linear(WIDTH, WIDTH, bias=False),
        mesh=init_device_mesh("cpu", (1,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    unit.set_force_sum_reduction_for_comms(True)
    if spares:
        skip_copy_in_out(unit)
    moves, gradients = [], []
    for _ in range(2):
        with Moves() as moved:
            unit(torch.randn(8, WIDTH)).square().sum().backward()
        gradient = unit.weight.grad
        assert isinstance(gradient, DTensor)
        moves.append(+moved.found)
        gradients.append(gradient.to_local().flatten().tolist())
    return moves[0], gradients


def test_a_unit_of_one_rank_casts_once_and_keeps_gradients_where_they_are(ranks: RankPool) -> None:
    ((found, gradients),) = ranks.run(two_backwards, True, world=1, timeout_s=60)
    ((of_torch, expected),) = ranks.run(two_backwards, False, world=1, timeout_s=60)
    assert gradients == expected
    assert found == {"copy_": 1}
    assert of_torch == {"_to_copy": 1, "copy_": 2}  # torch may spare them itself one day
