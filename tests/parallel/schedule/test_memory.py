"""The memory of a step follows the live activations of its schedule, however many micro-batches it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.step.plan import step_planner
from omnitrain.plan.schedule.actions import Action, Kind
from omnitrain.plan.schedule.table import table_of
from omnitrain.recipe import ComponentPlan, ParallelPlan
from tests.families import FAMILIES
from tests.models.staged import with_layers
from tests.peaks import peak_bytes

TOKENS, MANY = 512, 6
CHANGES = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}  # of the number of live micro-batches


def packs(number: int) -> list[Pack]:
    """Texts of one length; activations take many times the memory of parameters."""
    ids, mask = np.arange(TOKENS) % 50 + 3, np.arange(TOKENS) > 0
    return [
        Pack.from_samples([Sample(f"{index}", "text", ids, mask, np.arange(TOKENS), index=index)])
        for index in range(number)
    ]


def peaks_on_rank(schedule: dict[str, Any], few: int) -> list[tuple[int, int]]:
    """Of steps with few and with many micro-batches: bytes at the peak, and those of live activations at their peak."""
    config = with_layers(FAMILIES["qwen3"](), 8)
    model = build_parallelize_model(
        build_omni_model(foundation=foundation_class(config)(config)).train(),
        parallel_state=init_parallel_state(pp_size=2),
        parallel_plan=ParallelPlan(components={"foundation": ComponentPlan(schedule=schedule)}),
        enable_mixed_precision=False,
    )
    layout, planner = layout_of(model), step_planner(model)
    saved: list[int] = []

    @contextmanager
    def counted(*_: object) -> Iterator[None]:
        """Add up the bytes that a forward saves for its backward."""
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        for parameter in model.parameters():
            if not parameter.is_meta and type(parameter) is nn.Parameter:  # those of other stages are not gathered
                storages.pop(parameter.untyped_storage().data_ptr(), None)
        saved.append(sum(storages.values()))

    def actions_of(number: int) -> list[Action]:
        row = table_of(layout.topology.pipeline, number).actions[layout.pipeline.stages.rank]
        return [action for action in row if action.passes]

    accumulate_gradients(model, planner(packs(few)), forward_context=counted)
    forwards = [action.stage for action in actions_of(few) if action.kind is Kind.F]
    of_stage = dict(zip(forwards, saved, strict=True))
    found = []
    for number in (few, MANY):
        model.zero_grad(set_to_none=True)
        batch = planner(packs(number))
        peak = peak_bytes(lambda batch=batch: accumulate_gradients(model, batch))
        changes = [of_stage[action.stage] * CHANGES[action.kind] for action in actions_of(number)]
        found.append((peak, int(np.cumsum(changes).max())))
    return found


@pytest.mark.parametrize(
    ("schedule", "few"),
    [
        ({}, 2),
        pytest.param({"chunks": 2}, 2, marks=pytest.mark.slow),
        pytest.param({"kind": "zbv"}, 3, marks=pytest.mark.second),
    ],
    ids=str,
)
def test_memory_follows_the_peak_of_live_activations(ranks: RankPool, schedule: dict[str, Any], few: int) -> None:
    for (start, live), (more, live_of_more) in ranks.run(peaks_on_rank, schedule, few, timeout_s=60, world=2):
        assert live > 0.8 * start  # what is live is what takes memory
        assert more == pytest.approx(start + live_of_more - live, rel=0.05)
