"""Steps whose forwards and backwards run in turn, and the same steps with one after the other.

``python -m tests.parallel.schedule.paired`` writes the table ``paired.tsv`` again: a covering array, in which every
pair of values stands at least once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.contract.tiny_model import init_peaked_
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
from omnitrain.recipe import ComponentPlan, ExpertsBalance, ParallelPlan
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.recipe.plan_groups import PipelineSchedule
from tests.covering import covering
from tests.families import FAMILIES
from tests.models.staged import with_layers

TABLE = Path(__file__).with_name("paired.tsv")


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


class Case(NamedTuple):
    """A step with pairs; its values are words, so that a table can have them.

    Attributes:
        model: name of the family.
        stages: the pipeline, and the ranks that share experts if they are not two.
        blocks: whether their number is even or odd, so that a stage has other blocks than the one it runs with.
        micro_batches: number of micro-batches of the step.
        memory: what is recomputed or offloaded.
        experts: chunks, and whether gradients of weights are delayed.
        extra: dropout, losses of routers, or a loss of the user, whose gradient the forward takes.
    """

    model: str
    stages: str
    blocks: str
    micro_batches: str
    memory: str
    experts: str
    extra: str


MODELS = (
    "qwen3_moe",
    "glm4_moe",
    "qwen3_vl_moe",
)  # the second has a dense block and shared experts; the third deepstack
# Pipeline ranks, stages of each, and ranks that share the experts of a stage.
STAGES = {
    "pp1": (1, 1, 2),
    "pp2": (2, 1, 2),
    "pp2.v2": (2, 2, 2),
    "pp2.v3": (2, 3, 2),
    "pp4": (4, 1, 2),
    "pp4.v2": (4, 2, 2),
    "pp2.ep4": (2, 1, 4),
    "pp2.v2.ep4": (2, 2, 4),
}
NUMBERS = tuple(map(str, range(2, 10)))
PARTS = {"memory": {"recompute": {"parts": ["attention", "router", "expert_activation"]}}}
MEMORY = {
    "none": {},
    "full": {"memory": {"recompute": "full"}},
    "parts": PARTS,
    "offload": {"memory": {"offload": ["activations"]}},
    "named": {"memory": {"offload": ["dispatched_rows", "mlp_input"]}},
}
EXPERTS = ("1", "2", "3", "4", "1.delayed", "4.delayed")
EXTRAS = ("", "dropout", "balance", "loss")


def possible() -> list[Case]:
    axes = (MODELS, STAGES, ("even", "odd"), NUMBERS, MEMORY, EXPERTS, EXTRAS)
    return [Case(*values) for values in product(*axes)]


def num_ranks(case: Case) -> int:
    stages, _, experts = STAGES[case.stages]
    return stages * experts


def table() -> list[Case]:
    return [Case(*line.split("\t")) for line in TABLE.read_text().splitlines()]


def paired_and_one_by_one(case: Case) -> list[Step]:
    """The same step of a model with pairs, and with each pair as a forward and then a backward."""
    pp, stages, ep = STAGES[case.stages]
    config = with_layers(FAMILIES[case.model](), max(4, pp * stages) + (case.blocks == "odd"))
    text = config.get_text_config(decoder=True)
    text.attention_dropout = 0.2 if case.extra == "dropout" else 0.0
    setattr(text, "n_routed_experts" if hasattr(text, "n_routed_experts") else "num_experts", 16)
    torch.manual_seed(0)
    foundation = foundation_class(config)(config)
    init_peaked_(foundation)
    model = build_omni_model(foundation=foundation).train()
    model.runner.loss_function = smoothed if case.extra == "loss" else None
    samples = [probe.sample for probe in probe_samples(foundation, model.runner.native)]
    chunks, _, delayed = case.experts.partition(".")
    plan = ComponentPlan(
        ep=ep,
        schedule=PipelineSchedule(overlap=True, chunks=stages if stages > 1 else None),
        experts={"chunks": int(chunks), "delay_wgrad": bool(delayed)},
        **MEMORY[case.memory],
    )
    model = build_parallelize_model(
        model,
        parallel_state=init_parallel_state(pp_size=pp, ep_size=ep),
        parallel_plan=ParallelPlan(components={FOUNDATION: plan}),
        enable_mixed_precision=False,
    )
    rank, number = get_parallel_state().dp_rank, int(case.micro_batches)
    batch = step_planner(model)([pack(samples, index, rank) for index in range(number)])
    balance = ExpertsBalance(loss="sample", weight=0.01, z_weight=0.001)
    routers = RouterMonitor(model, balance) if case.extra == "balance" else None
    with_pairs, found = schedule_of(model, batch.plan), []
    for schedule in (with_pairs, one_by_one(with_pairs)):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        if routers is not None:
            routers.begin(batch.packs)
        with counted_turns() as given:
            loss = Executor(model, batch, {}, routers=routers).run(schedule)
        gradients = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        found.append(Step(loss, gradients, len(given)))
    return found


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)


def pack(samples: list[Sample], index: int, rank: int) -> Pack:
    """A pack of other samples and another length on each rank."""
    number = 1 + (index + rank) % 2
    return Pack.from_samples([samples[(index + 2 * rank + other) % len(samples)] for other in range(number)])


def local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def one_by_one(schedule: Schedule) -> Schedule:
    """The schedule with each pair as a forward, then a backward."""
    return schedule.with_actions(
        [part for action in row for part in action.parts or (action,)] for row in schedule.actions
    )


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


if __name__ == "__main__":
    TABLE.write_text("".join("\t".join(case) + "\n" for case in covering(possible())))
