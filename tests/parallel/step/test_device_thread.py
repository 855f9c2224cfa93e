"""On a GPU a backward runs in a thread of the device, where nothing is of what the forward's thread has for itself.

These run with ``--device-thread`` only (``make test-device-thread``); without, they would repeat other tests.
"""

from __future__ import annotations

from typing import Any

import pytest

from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.verify import verify
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
from tests.parallel.expert.test_experts import text_samples
from tests.parallel.verify.test_verify import hf_samples

pytestmark = pytest.mark.device_thread


def plan(**fields: Any) -> ParallelPlan:
    return ParallelPlan(default=ComponentPlan(**fields))


EXPERTS = [plan(dp_shard=2, ep=2, experts={"chunks": 2, "delay_wgrad": True}, memory={"recompute": "full"})]
SEQUENCES = [
    plan(dp_shard=1, ulysses=2, async_ulysses=True, memory={"recompute": "full"}),
    plan(dp_shard=1, tp=2, sequence_parallel=True, memory={"recompute": "full"}),
]
MORE = [
    plan(dp_shard=2, ep=2, experts={"chunks": 2, "delay_wgrad": True}),
    plan(dp_shard=2, ep=2, memory={"recompute": "parts", "offload": ["mlp_input"]}, experts={"delay_wgrad": True}),
    plan(dp_shard=2, ep=2, memory={"recompute": "selective"}),
    plan(dp_shard=2, ep=2, memory={"recompute": "full", "offload": ["activations"]}, experts={"rows": 5}),
    "dp2.accum2.offload.recompute",
    "cp2.recompute",
    "tp2.recompute",
]


def check(ranks: RankPool, name: str, samples: list[Any], layouts: list[Any]) -> None:
    report = verify(f"tests.parallel.factories:{name}", samples, layouts, nproc=2, pool=ranks, timeout_s=120)
    assert {row.status for row in report.rows} == {"equal"}, str(report)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("moe_with_shared_experts", EXPERTS),
        ("qwen3_of_four_heads", SEQUENCES),
        ("qwen3_moe_with_adapters", ["dp2.ep2.recompute"]),
    ],
)
def test_a_backward_in_the_devices_thread_has_the_gradients_of_one_process(
    ranks: RankPool, name: str, layouts: list[Any]
) -> None:
    check(ranks, name, text_samples(), layouts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl_moe", "qwen3_next"])
def test_so_it_has_in_every_layout(ranks: RankPool, name: str) -> None:
    check(ranks, name, hf_samples(name), MORE)
