"""Steps whose forwards and backwards run in turn, and the same steps with one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.discovery import init_peaked_
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.ops import turns
from omnitrain.parallel.expert.load_balance import RouterMonitor
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.executor import Executor
from omnitrain.parallel.schedule.table import schedule_of
from omnitrain.parallel.state import get_parallel_state, init_parallel_state
from omnitrain.parallel.step.plan import step_planner
from omnitrain.plan.schedule.actions import Schedule
from omnitrain.recipe import ComponentPlan, ParallelPlan
from omnitrain.recipe.parallel import FOUNDATION
from tests.families import FAMILIES
from tests.models.staged import with_layers

LENGTHS = (24, 9, 17, 30, 12, 21, 5, 28, 16)


class Step(NamedTuple):
    """What a step of this rank gave.

    Attributes:
        loss: this rank's part of the total loss, a scalar.
        gradients: parameter -> its local gradient.
        turns: number of times that a pass gave its turn to another one.
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    turns: int


def in_turn_and_plain(
    family: str,
    plan: dict[str, Any],
    *,
    state: Mapping[str, int],
    layers: int = 4,
    micro_batches: int = 4,
    dropout: float = 0.0,
    balance: Any = None,
) -> list[Step]:
    """The same step of a model with pairs, and with each pair as a forward and then a backward."""
    config = with_layers(FAMILIES[family](), layers)
    config.attention_dropout = dropout
    torch.manual_seed(0)
    foundation = foundation_class(config)(config)
    init_peaked_(foundation)
    model = build_parallelize_model(
        build_omni_model(foundation=foundation).train(),
        parallel_state=init_parallel_state(**state),
        parallel_plan=ParallelPlan(components={FOUNDATION: ComponentPlan(**plan)}),
        enable_mixed_precision=False,
    )
    rank = get_parallel_state().dp_rank
    batch = step_planner(model)([pack(index, rank) for index in range(micro_batches)])
    paired = schedule_of(model, micro_batches)
    routers = None if balance is None else RouterMonitor(model, balance)
    found = []
    for schedule in (paired, one_by_one(paired)):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        if routers is not None:
            routers.begin(batch.packs)
        with counted_turns() as number:
            loss = Executor(model, batch, {}, routers=routers).run(schedule)
        gradients = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        found.append(Step(loss, gradients, len(number)))
    return found


def pack(index: int, rank: int) -> Pack:
    """A pack of another length on each rank."""
    n = LENGTHS[index] + 3 * rank
    ids, name = (np.arange(n) * (rank + 3)) % 50 + 3, f"{rank}.{index}"
    return Pack.from_samples([Sample(name, "text", ids, np.arange(n) > 0, np.arange(n), index=n)])


def local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def one_by_one(schedule: Schedule) -> Schedule:
    """The schedule with each pair as a forward, then a backward."""
    return schedule.with_actions([part for action in row for part in action.parts or (action,)] for row in schedule.actions)


@contextmanager
def counted_turns() -> Iterator[list[None]]:
    given: list[None] = []
    plain = turns._Turns.give

    def give(self: turns._Turns) -> None:
        given.append(None)
        plain(self)

    turns._Turns.give = give
    try:
        yield given
    finally:
        turns._Turns.give = plain
