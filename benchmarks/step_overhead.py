"""The cost of a step of ``Trainer.fit`` over a bare loop on the same packs.

``trainer`` is ``fit`` itself, on the quickstart's recipe: packs from the loader and its worker, ``train_step``, metrics
and progress. Its loader is wrapped, so that the clock runs from the moment ``fit`` asks for a round's first step to the
moment it asks for the next round's: nothing that happens per step is left out. ``bare`` runs in between, on a copy of
the model: forward, backward, clipping, AdamW, over the same packs, already in memory. ``cpu_overhead`` is the same
ratio of processor seconds of the main process: on a busy machine it tells work from waiting for a core. Before each
round the copy takes over the trainer's weights and moments, so that both do the same work all along. An epoch of
packs is drawn first: the figure is that of the steady state, in which the worker keeps every sample prepared.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median

import torch
from harness import QUICKSTART, Around, Result, in_turn, parser, report, start

from omnitrain.data.loading.loader import build_dataloader
from omnitrain.data.packing.pack import Pack
from omnitrain.models.omni.model import OmniModel
from omnitrain.optim.build import build_optimizer
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer

FORMULA = "overhead = median over rounds of (trainer seconds / bare seconds) - 1"
WARM_UP = 1  # rounds that do not count


class BareLoop:
    """A training loop of five lines, over packs in memory."""

    def __init__(self, model: OmniModel, packs: list[Pack], recipe: Recipe) -> None:
        self.model, self.packs = copy.deepcopy(model), packs
        self.optimizer = build_optimizer(self.model, recipe.train.optimizer)
        self.max_norm = recipe.train.optimizer.max_grad_norm
        self.losses: list[torch.Tensor] = []

    def follow(self, trainer: Trainer) -> None:
        """Continue from the state of ``trainer``."""
        self.model.load_state_dict(trainer.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))

    def run(self, first: int, steps: int) -> None:
        """Train on ``packs[first : first + steps]``."""
        for pack in self.packs[first : first + steps]:
            loss = torch.stack([term.sum / term.count for term in self.model(pack).losses.values()]).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())


class Clock:
    """Wall seconds and CPU seconds of this process (without its workers) since the clock was created."""

    def __init__(self) -> None:
        self._wall, self._process = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """``seconds`` and ``cpu_seconds``."""
        return {"seconds": time.perf_counter() - self._wall, "cpu_seconds": time.process_time() - self._process}


class Rounds(Around):
    """Passes the trainer its steps, and runs the bare loop between the trainer's rounds."""

    def __init__(self, trainer: Trainer, bare: BareLoop, rounds: int, steps: int, first: int) -> None:
        super().__init__(trainer.loader)
        self.trainer, self.first = trainer, first
        self.bare, self.rounds, self.steps = bare, rounds, steps
        self.readings: dict[str, list[dict[str, float]]] = {"trainer": [], "bare": []}
        self.waited: list[float] = []
        self.ids: list[tuple[str, ...]] = []

    def __iter__(self) -> Iterator[StepBatch]:
        steps = islice(iter(self.loader), self.first, None)
        for index in range(self.rounds):
            self.bare.follow(self.trainer)
            for side in in_turn(("trainer", "bare"), index):
                clock = Clock()
                if side == "bare":
                    self.bare.run(index * self.steps, self.steps)
                else:
                    yield from self._steps(steps)
                self.readings[side].append(clock.read())
        yield next(steps)

    def _steps(self, steps: Iterator[StepBatch]) -> Iterator[StepBatch]:
        waited = 0.0
        for _ in range(self.steps):
            asked = time.perf_counter()
            step = next(steps)
            waited += time.perf_counter() - asked
            self.ids += [pack.info.ids for pack in step.packs]
            yield step
        self.waited.append(waited)


def measure(rounds: int, steps: int, skipped: int, folder: str) -> Result:
    """Measure both sides in turn; the warm-up rounds are dropped."""
    total = (WARM_UP + rounds) * steps
    changes = ["train.optimizer={warmup_steps: 0, schedule: constant}", "data.heldout=[]", "evaluation=null"]
    # One step more than is measured: the clock of the last round stops when it is asked for.
    recipe = Recipe.load(QUICKSTART, [*changes, f"train.steps={total + 1}", f"output_dir={folder}/run"])
    trainer = Trainer(recipe)
    in_process = recipe.data.model_copy(update={"workers": 0})
    without_tails = trainer.model.runner.contract.without_tails
    drawn = build_dataloader(in_process, trainer.processor, seed=recipe.train.seed, without_tails=without_tails)
    packs = [pack for (pack,) in islice(drawn, skipped, skipped + total)]
    bare = BareLoop(trainer.model, packs, recipe)
    watched = Rounds(trainer, bare, WARM_UP + rounds, steps, skipped)
    trainer.loader = watched
    trainer.fit()
    assert watched.ids == [pack.info.ids for pack in packs], "the two sides saw different packs"
    _check_losses(bare, Path(recipe.output_dir, "metrics.jsonl"))
    measured = {
        f"{side}_{kind}": [reading[kind] for reading in readings[WARM_UP:]]
        for side, readings in watched.readings.items()
        for kind in ("seconds", "cpu_seconds")
    }
    ratios = _ratios(measured["trainer_seconds"], measured["bare_seconds"])
    return Result(
        name="step_overhead",
        formula=FORMULA,
        figures={
            "overhead": median(ratios) - 1,
            "cpu_overhead": median(_ratios(measured["trainer_cpu_seconds"], measured["bare_cpu_seconds"])) - 1,
            **{f"{name}_per_step": median(values) / steps for name, values in measured.items()},
            "next_pack_seconds_per_step": median(watched.waited[WARM_UP:]) / steps,
            "tokens_per_step": sum(pack.num_tokens for pack in packs) / total,
        },
        rounds={**measured, "ratio": ratios},
    )


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _check_losses(bare: BareLoop, metrics: Path) -> None:
    """Check that the losses of both sides agree in a round; else one side did other work.

    Not longer than a round: torch's clipping adds up the norm in another order, and training makes a difference in the
    last bit grow, to 3e-3 in 240 steps (clipped by the same function, both sides stay equal to the bit).
    """
    for line in map(json.loads, metrics.read_text().splitlines()):
        if line["step"] <= len(bare.losses):
            torch.testing.assert_close(line["loss"], bare.losses[line["step"] - 1].item(), rtol=1e-5, atol=0)


def main() -> None:
    """Measure and report."""
    arguments = parser(sys.modules[__name__].__doc__ or "", rounds=7, steps=30)
    arguments.add_argument("--skip", type=int, default=350, help="packs drawn first; 350 are an epoch")
    options = start(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report(measure(options.rounds, options.steps, options.skip, folder), options.json)


if __name__ == "__main__":
    main()
