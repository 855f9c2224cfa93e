"""Whole training steps on the device against the CPU: tiny models, the quickstart, a resumed run."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from harness import QUICKSTART, ROOT
from omni_step import OmniStep
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gpu.checks_of_ops import Check
from gpu.compared import beyond, nudged
from gpu.tiny_steps import PLAIN, STEPS, Compute
from omnitrain.data.packing.pack import Pack
from omnitrain.ops.rounding import DRAWS, Step, nudge
from omnitrain.parallel.state import leave_process_groups
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer

CPU = torch.device("cpu")
Gradients = Callable[[OmniStep, list[Pack]], Step]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, which is all of it on one rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> trained weight, where it lies."""
    return {name: local(p.detach()) for name, p in model.named_parameters() if p.requires_grad}


def taken_gradients(step: OmniStep) -> dict[str, Tensor]:
    """Return name -> gradient on the CPU, and clear them."""
    parameters = dict(step.model.named_parameters())
    found = {name: local(p.grad).detach().cpu().clone() for name, p in parameters.items() if p.grad is not None}
    step.model.zero_grad(set_to_none=True)
    return found


def gradients(step: OmniStep, packs: list[Pack]) -> Step:
    """Return the loss and the gradients of a step over one pack."""
    loss = step.accumulate(packs[:1]).item()
    return loss, taken_gradients(step)


def update(step: OmniStep, packs: list[Pack]) -> Step:
    """Return the loss of the second step, after an update."""
    step.optimizer.state.clear()
    step.run(packs[:1])
    return step.run(packs[:1]), {}


def with_moved_weights(weights: Mapping[str, Tensor], dtype: torch.dtype, run: Callable[[], Step]) -> Iterator[Step]:
    """Run a step as it is, then :data:`DRAWS` times with weights and results that are moved to neighbouring numbers."""
    kept = {name: weight.clone() for name, weight in weights.items()}
    yield run()
    for seed in range(DRAWS):
        for name, weight in weights.items():
            weight.copy_(kept[name])
        nudge(weights, lambda _: dtype, seed)
        yield nudged(run(), seed)


@cache
def reference(kind: str, compute: Compute, measured: Gradients) -> tuple[Step, tuple[Step, ...]]:
    """Return a step in fp32 on the CPU, and with moved weights, in ``compute``."""
    with STEPS[kind].on(CPU, "float32") as (step, packs):
        expected = measured(step, packs)
    with STEPS[kind].on(CPU, compute) as (step, packs):
        weights, dtype = weights_of(step.model), getattr(torch, compute)
        return expected, tuple(with_moved_weights(weights, dtype, partial(measured, step, packs)))[1:]


def tiny_step(name: str, compute: Compute, measured: Gradients = gradients) -> Check:
    """A step of :data:`STEPS` against the same model's plain step on the CPU."""
    how = STEPS[name]

    def measure(device: torch.device) -> float:
        with how.on(device, compute) as (step, packs):
            found = measured(step, packs)
        expected, draws = reference(how.kind, compute, measured)
        return beyond(expected, iter(draws), found)

    return Check(f"{measured.__name__} of {name} {compute}", measure, how.obstacle)


# --- the quickstart's trainer ---

QUICKSTART_STEPS = 5
FEW = ("evaluation=null", "data.heldout=[]", "data.pack_tokens=256", "train.log_every=1")


@contextmanager
def quickstart(folder: Path, device: torch.device, *changes: str, resume: bool = False) -> Iterator[Trainer]:
    """Build the trainer of the quickstart without its evaluation, and leave its process group at the end."""
    own = (f"output_dir={folder}", f"train.device={device}")
    recipe = Recipe.load(str(ROOT / QUICKSTART), [*FEW, *own, *changes])
    try:
        yield Trainer(recipe, resume=resume)
    finally:
        leave_process_groups()


def losses_of(trainer: Trainer, batches: list[Any]) -> Step:
    """Return the losses of the first steps, from the weights that the model has."""
    trainer.measures.step = 0
    trainer.optimizer.state.clear()
    losses = [trainer.train_step(batch)[0] for batch in batches]
    return losses[-1], {f"loss {i}": torch.tensor([loss], dtype=torch.float64) for i, loss in enumerate(losses)}


@cache
def first_steps(device: torch.device, precision: str, dtype: torch.dtype) -> list[Step]:
    """Return the quickstart's first steps; then with weights that are moved to neighbouring numbers of ``dtype``."""
    with tempfile.TemporaryDirectory() as folder:
        changes = (f"train.steps={QUICKSTART_STEPS}", f"train.precision={precision}")
        with quickstart(Path(folder), device, *changes) as trainer, closing(iter(trainer.loader)) as steps:
            run = partial(losses_of, trainer, list(islice(steps, QUICKSTART_STEPS)))
            return [*with_moved_weights(weights_of(trainer.model), dtype, run)]


def quickstart_steps(precision: str, dtype: torch.dtype) -> Check:
    """The quickstart's first losses through the trainer, its loader and its data process."""

    def measure(device: torch.device) -> float:
        expected, found = first_steps(CPU, "fp32", torch.float32)[0], first_steps(device, precision, dtype)[0]
        return beyond(expected, iter(first_steps(CPU, precision, dtype)[1:]), found)

    return Check(f"quickstart {precision}", measure)


def resumed(device: torch.device) -> float:
    """A run saves in the background, and its next step after a resume has the loss that it had; 0: to the bit."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        changes = ("train.steps=3", "train.save.every=2", "train.save.background=true")
        with quickstart(run, device, *changes) as trainer:
            last = trainer.fit().checkpoint
        whole = last_loss(run)
        shutil.rmtree(last)
        with quickstart(run, device, *changes, resume=True) as trainer:
            assert trainer.step == 2, f"resumed at step {trainer.step}; the checkpoint of step 2 was expected"
            trainer.fit()
        return 0.0 if last_loss(run) == whole else math.inf


def last_loss(run: Path) -> float:
    """Return the loss in the last line of a run's metrics."""
    loss: float = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    return loss


def checks() -> list[Check]:
    """Return all of them."""
    variants = [name for name in STEPS if name not in PLAIN]
    computes: tuple[Compute, Compute] = ("float32", "bfloat16")
    return [
        *(tiny_step(name, compute) for name in PLAIN for compute in computes),
        *(tiny_step(name, "bfloat16") for name in variants),
        *(tiny_step(name, "float32", update) for name in ("text", "text optimizer offload")),
        quickstart_steps("fp32", torch.float32),
        quickstart_steps("bf16", torch.bfloat16),
        Check("save in the background, resume", resumed),
    ]
