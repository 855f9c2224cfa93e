from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from omnitrain.train.metrics.costs import AGAIN, BACKWARD, FORWARD, LABEL, STEP, Costs, Facts, advice, costs_of

NODE = "autograd::engine::evaluate_function: "


@dataclass
class Record:
    """A record of a profile; of ``[name, ms, sequence number, children]`` in :func:`profile`."""

    name: str
    self_cpu_time_total: float
    sequence_nr: int
    cpu_parent: Any
    time_range: Any
    thread: int = 1
    self_device_time_total: float = 0.0


def profile(tree: list[Any], parent: Record | None = None, records: list[Record] | None = None) -> list[Record]:
    """The records of a tree ``(name, own ms, sequence number, *children)``."""
    records = [] if records is None else records
    name, own, number, *children = tree
    record = Record(name, 1e3 * own, number, parent, SimpleNamespace(start=len(records), elapsed_us=lambda: 1e5))
    records.append(record)
    for child in children:
        profile(child, record, records)
    return records


def test_costs_belong_to_parts_and_backwards_to_the_part_of_their_forward() -> None:
    layer = [
        f"{LABEL}layers", 1, -1,
        ["aten::mm", 10, 7],
        [f"{LABEL}attention", 0, -1, ["aten::bmm", 4, 8]],
        ["aten::gelu", 2, 9],
    ]  # fmt: skip
    again = [["aten::mm", 10, 21], [f"{LABEL}attention", 0, -1, ["aten::bmm", 4, 22]], ["aten::gelu", 2, 23]]
    records = profile([
        STEP, 0, -1,
        [f"{LABEL}wait for data", 5, -1],
        layer,
        [f"{NODE}GeluBackward0", 0, 9, ["aten::gelu_backward", 3, -1]],
        [f"{NODE}BmmBackward0", 0, 8, ["aten::bmm", 8, -1]],
        # What is computed again is numbered anew, within the node that needs it.
        [f"{NODE}MmBackward0", 0, 7, ["MmBackward0", 0, 7, ["aten::mm", 20, -1]], ["FSDP::all_gather", 6, -1], *again],
        ["Optimizer.step#AdamW.step", 0, -1, ["aten::_fused_adamw_", 9, -1]],
    ])  # fmt: skip
    costs = costs_of(records)
    assert costs.seconds == pytest.approx(0.1)
    found = {name: {p: 1e3 * seconds for p, seconds in row.items()} for name, row in costs.rows.items()}
    assert found == {
        "matrix products of layers": pytest.approx({FORWARD: 10, BACKWARD: 20, AGAIN: 10}),
        "attention": pytest.approx({FORWARD: 4, BACKWARD: 8, AGAIN: 4}),
        "norms, activations and copies of layers": pytest.approx({FORWARD: 2, BACKWARD: 3, AGAIN: 2}),
        "optimizer": pytest.approx({FORWARD: 9}),
        "all-gather of FSDP": pytest.approx({BACKWARD: 6}),
        "wait for data": pytest.approx({FORWARD: 5}),
        "Python between operations": pytest.approx({FORWARD: 1}),
    }
    assert list(costs.rows)[:2] == ["matrix products of layers", "attention"]
    assert costs.again() == pytest.approx(0.16)


QUIET = Facts(ranks=2, workers=1, is_compiled=False, packs_per_step=4, fill=0.95, settings={}, imbalance={})


def of(**milliseconds: float) -> Costs:
    rows = {name.replace("_", " "): {FORWARD: ms / 1e3} for name, ms in milliseconds.items()}
    return Costs(rows, seconds=0.1, is_of_device=False)


def test_nothing_is_advised_where_no_figure_supports_it() -> None:
    assert not [*advice(of(attention=60, wait_for_data=2, optimizer=5), QUIET)]
    waits = Costs({"Python between operations": {FORWARD: 0.04}}, 0.1, is_of_device=False)
    assert not [*advice(waits, QUIET)]  # of two ranks for each other


@pytest.mark.parametrize(
    ("costs", "facts", "setting"),
    [
        (of(wait_for_data=20), QUIET, "data.workers=3"),
        (of(optimizer=20), QUIET, "train.packs_per_step=8"),
        (
            Costs({"Python between operations": {FORWARD: 0.04}}, 0.1, False),
            replace(QUIET, ranks=1),
            "train.compile=true",
        ),
        (Costs({"all-gather of FSDP": {FORWARD: 0.02}}, 0.1, False), QUIET, "parallel.default.mode=hsdp"),
        (Costs({"attention": {AGAIN: 0.02}}, 0.1, False), QUIET, "recompute: selective"),
        (
            of(media_of_vision=20),
            replace(QUIET, imbalance={"vision": 1.5}),
            "parallel.components.vision.place=world",
        ),
        (
            Costs({"all-to-all": {FORWARD: 0.02}}, 0.1, False),
            replace(QUIET, settings={"foundation": {"ep": 2}}),
            "parallel.components.foundation.experts.chunks=auto",
        ),
        (of(attention=60), replace(QUIET, fill=0.5), "data.packing_buffer"),
    ],
    ids=["data", "optimizer", "python", "gathers", "recompute", "place", "experts", "fill"],
)
def test_advice_names_the_setting_and_the_figure(costs: Costs, facts: Facts, setting: str) -> None:
    (line,) = advice(costs, facts)
    assert setting in line and any(character.isdigit() for character in line)


def test_what_a_plan_has_set_is_not_advised() -> None:
    facts = replace(QUIET, imbalance={"vision": 1.5}, settings={"vision": {"place": "world"}})
    assert not [*advice(of(media_of_vision=20), facts)]
