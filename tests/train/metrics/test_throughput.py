from __future__ import annotations

import pytest

from omnitrain.plan import (
    ItemFacts,
    MicroBatchFacts,
    Placement,
    StepPlan,
    Topology,
    decode_tables,
    encode_table,
    plan_step,
)
from omnitrain.train.metrics import step_timing
from omnitrain.train.metrics.step_timing import Stopwatch


def plan_of_two_ranks() -> StepPlan:
    """Rank 0 has samples of 10 and 20 tokens and two images of 4 and 6 tokens, rank 1 a sample of 10 tokens."""
    components = (
        Placement("vision", (0, 1), media=("vision",)),
        Placement("foundation", (0, 1), reads_packs=True),
    )
    topology = Topology(2, components, ("text",))
    images = (ItemFacts(4, 1), ItemFacts(6, 1))
    facts = [MicroBatchFacts({"text": 5}, (10, 20), {"vision": images}), MicroBatchFacts({"text": 5}, (10,))]
    tables = [encode_table(topology, (of_rank,)) for of_rank in facts]
    return plan_step(topology, decode_tables(topology, tables))


def test_speed_fill_and_imbalance_follow_from_the_plans_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(step_timing.time, "perf_counter", lambda: now[0])
    stopwatch = Stopwatch()
    for _ in range(2):
        stopwatch.add(plan_of_two_ranks(), waited=0.5)
    now[0] = 104.0
    assert stopwatch.data_wait == 1 / 4
    assert stopwatch.read(room=50) == {
        "tokens_per_second": 80 / 4,
        "samples_per_second": 6 / 4,
        "fill": 80 / 100,
        "imbalance": 30 / 20,
        "media": {"vision": {"items_per_second": 4 / 4, "tokens_per_second": 20 / 4}},
    }
    now[0] = 105.0
    assert stopwatch.read(room=50)["tokens_per_second"] == 0 and stopwatch.seconds == pytest.approx(1e-9)
