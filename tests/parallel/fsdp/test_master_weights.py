"""Under mixed precision, weights and the optimizer's state stay fp32 on ranks, too."""

from __future__ import annotations

from typing import Any

import torch

from omnitrain.optim.build import build_optimizer
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Optimizer
from tests.parallel.laid_out import full, laid_out, pack, total

LEARNING_RATE, STEPS = 1e-5, 2


def moved_on_rank() -> dict[str, Any]:
    """How many of the norms' weights, all 1, have moved; in bf16 the next number below 1 is 0.996."""
    model = laid_out(enable_mixed_precision=True)
    norms = [p for name, p in model.foundation.named_parameters() if "layernorm" in name]
    with torch.no_grad():
        for weight in norms:
            weight.fill_(1.0)
    optimizer = build_optimizer(model, Optimizer(learning_rate=LEARNING_RATE, weight_decay=0.0))
    computed = set()
    mlp = model.foundation.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, output: computed.add(output.dtype))
    for _ in range(STEPS):
        total(model(pack())).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([full(weight.detach()) for weight in norms])
    states = {value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"}
    return {
        "moved": (weights != 1).float().mean().item(),
        "furthest": (weights - 1).abs().max().item(),
        "dtypes": states | {p.dtype for p in model.parameters()},
        "computed": computed,
    }


def test_every_weight_near_one_moves_at_a_small_rate_while_ranks_compute_in_bf16(ranks: RankPool) -> None:
    for found in ranks.run(moved_on_rank, timeout_s=60, world=2):
        assert found["computed"] == {torch.bfloat16} and found["dtypes"] == {torch.float32}
        assert found["moved"] == 1.0 and 0 < found["furthest"] <= 1.01 * STEPS * LEARNING_RATE
