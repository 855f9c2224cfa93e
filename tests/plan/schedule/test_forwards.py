"""Schedules without backwards: every stage runs every micro-batch once, and no rank waits in a circle."""

from __future__ import annotations

from collections import Counter

import pytest

from omnitrain.plan import Placement
from omnitrain.plan.schedule.actions import Kind, without_backwards
from omnitrain.plan.schedule.encoders import with_encoders
from omnitrain.plan.schedule.generators import generate
from omnitrain.plan.schedule.lower import lower
from omnitrain.plan.schedule.simulate import simulate

KINDS = [("gpipe", 1, False), ("1f1b", 1, False), ("1f1b", 1, True), ("interleaved", 2, False), ("zbv", 2, False)]


@pytest.mark.parametrize(("kind", "chunks", "overlap"), KINDS)
def test_every_kind_of_schedule_runs_its_forwards_alone(kind: str, chunks: int, overlap: bool) -> None:
    encoders = (Placement("vision", (), window=2),)
    schedule = lower(with_encoders(generate(kind, 4, 8, num_chunks=chunks, overlap=overlap), encoders))
    forwards = without_backwards(schedule)
    kinds = Counter(action.kind for row in forwards.actions for action in row)
    assert kinds[Kind.F] == 8 * 4 * chunks and not kinds.keys() & {Kind.B, Kind.I, Kind.W, Kind.ENCODE_B, Kind.REDUCE}
    assert kinds[Kind.SEND_F] == kinds[Kind.RECV_F] > 0
    for slots in (None, 0):  # as gloo does, and as NCCL does at worst
        assert simulate(forwards, dict.fromkeys(Kind, 1.0), slots=slots).makespan >= 8 * chunks


def test_for_features_alone_only_the_first_stage_reads() -> None:
    encoders = (Placement("vision", (), window=2),)
    schedule = lower(with_encoders(generate("1f1b", 4, 8), encoders))
    rows = without_backwards(schedule, encodes_only=True).actions
    assert [[str(a) for a in row if a.kind is Kind.F] for row in rows] == [[f"0F{i}" for i in range(8)], [], [], []]
    assert all(sum(a.kind is Kind.ENCODE for a in row) == 4 for row in rows)
    assert not any(a.kind in (Kind.SEND_F, Kind.RECV_F) for row in rows for a in row)
