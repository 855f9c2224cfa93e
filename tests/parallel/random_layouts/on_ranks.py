"""What the ranks of a row do: the loop of a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import omnitrain as ot
from omnitrain.data.packing.budget import pack_all
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.optim.build import build_optimizer
from omnitrain.optim.offload import OffloadedOptimizer
from omnitrain.parallel.state import init_state_of
from omnitrain.recipe import Optimizer
from omnitrain.recipe.parallel import MAIN
from omnitrain.train.lr_groups import matrices_of
from tests.parallel.random_layouts.models import build
from tests.parallel.random_layouts.reference import BETAS, DECAY, EPS, LOSS_WEIGHTS, MAX_NORM, MOMENTUM, RATE, Outcome
from tests.parallel.random_layouts.rows import Row

Mutant = tuple[int, str, float]  # rank, parameter, factor of its gradient


def optimizer_of(model: OmniModel, row: Row) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    layout = ot.parallel.layout_of(model)
    offloaded = layout.offloaded(model)
    if row.optimizer == "sgd":
        make = partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM)
        return OffloadedOptimizer(make, [{"params": trained}], offloaded) if offloaded else make(trained)
    kind = "muon" if row.optimizer == "muon" else "adamw"
    settings = Optimizer(
        kind=kind,
        state="int8" if row.optimizer == "int8" else "float32",
        learning_rate=RATE,
        weight_decay=DECAY,
        betas=BETAS,
        eps=EPS,
        **({"momentum": MOMENTUM} if kind == "muon" else {}),
    )
    return build_optimizer(model, settings, offloaded, matrices=matrices_of(model, settings))


def packs_of(model: OmniModel, samples: Sequence[Sample], cells: Sequence[Sequence[int]]) -> list[Pack]:
    alone = not model.runner.contract.packs
    drawn = [[samples[number] for number in pack] for pack in cells]
    return [pack for some in drawn for pack in pack_all(some, 10_000, alone=alone)]


def train(
    row: Row,
    samples: Sequence[Sample],
    steps: Sequence[Sequence[Sequence[Sequence[int]]]],
    mutant: Mutant | None = None,
) -> Outcome | str:
    """The steps on this rank; what it refuses in words."""
    try:
        return _train(row, samples, steps, mutant)
    except UserError as error:
        return str(error)


def _train(
    row: Row, samples: Sequence[Sample], steps: Sequence[Sequence[Sequence[Sequence[int]]]], mutant: Mutant | None
) -> Outcome:
    plan = row.plan()
    state = init_state_of(plan)
    model = ot.build_parallelize_model(build(row), parallel_plan=plan, enable_mixed_precision=None)
    layout, planner, optimizer = ot.parallel.layout_of(model), ot.step_planner(model), optimizer_of(model, row)
    reads = state.section == MAIN
    batches = [planner(packs_of(model, samples, cells[state.dp_rank]) if reads else []) for cells in steps]
    outcome, before = Outcome(), _whole({name: p.detach() for name, p in model.named_parameters()})
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    times = 2 if "again" in row.words else 1
    calls = [batch for batch in batches for _ in range(times)]
    for number, (batch, following) in enumerate(zip_longest(calls, calls[1:]), 1):
        weights = LOSS_WEIGHTS if "weights" in row.words else None
        upcoming = following if layout.encodes_ahead else None
        loss = ot.accumulate_gradients(model, batch, loss_weights=weights, upcoming=upcoming).double()
        if number % times:
            continue
        dist.all_reduce(loss)
        if not outcome.losses:
            if mutant is not None and dist.get_rank() == mutant[0]:
                _local(trained[mutant[1]].grad).mul_(mutant[2])
            outcome.gradients = _whole({name: p.grad for name, p in trained.items() if p.grad is not None})
        most = MAX_NORM if "clip" in row.words else None
        outcome.norms.append(float(ot.clip_gradients(model.parameters(), most)))
        outcome.losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    after = _whole({name: p.detach() for name, p in trained.items()})
    outcome.moved = {name: weight - before[name] for name, weight in after.items()}
    return outcome


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors of what this rank holds a part of."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)
        for name, tensor in tensors.items()
        if not tensor.is_meta
    }
