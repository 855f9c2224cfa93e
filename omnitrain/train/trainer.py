"""``Trainer(recipe).fit()``: one loop, one step on one screen."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omnitrain.data.loader import StepLoader, build_dataloader, require_usable
from omnitrain.data.pack import Pack
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.rows import RowSource, open_sources
from omnitrain.errors import TrainingError, UserError
from omnitrain.models.omni import OmniModel
from omnitrain.models.table import component_rows
from omnitrain.ops.compile import CompiledBlocks, compile_blocks
from omnitrain.optim.adamw import build_optimizer, learning_rate
from omnitrain.optim.gradients import clip_gradients
from omnitrain.recipe import ParallelPlan, Recipe
from omnitrain.recipe.load import require_heads
from omnitrain.train.device import use_device
from omnitrain.train.display import StepProgress, console, quiet_libraries, show_components, show_contract, show_scores
from omnitrain.train.evaluate import evaluate, load_scorer
from omnitrain.train.folder import RunFolder
from omnitrain.train.interrupt import Interrupt
from omnitrain.train.metrics import LossMeter, MetricsFile, Stopwatch, peak_memory_mb
from omnitrain.train.resume import require_same_rows
from omnitrain.train.samples import save_samples
from omnitrain.train.setup import build_from_recipe, load_checkpoint, use_ops
from omnitrain.train.state import TrainingState, read_state, write_state


class NonFiniteError(TrainingError):
    """A loss or gradient became NaN or infinite; the message names the samples. Nothing was updated."""


@dataclass(frozen=True)
class RunSummary:
    """How a run ended.

    Attributes:
        step: optimizer steps done.
        interrupted: Ctrl-C ended it early.
        checkpoint: the last checkpoint.
        scores: of the evaluation; empty without one.
    """

    step: int
    interrupted: bool
    checkpoint: Path
    scores: dict[str, float]


class Trainer:
    """Trains the model of a recipe.

    Attributes:
        recipe: as given.
        folder: where the run writes.
        model: the model, in place.
        processor: rows -> samples.
        loader: training data, step by step.
        heldout: the held-out data sets.
        optimizer: AdamW.
        step: optimizer steps done.
    """

    def __init__(self, recipe: Recipe, *, resume: bool = False) -> None:
        """Build everything; nothing is written before :meth:`fit`.

        Args:
            recipe: what to train.
            resume: continue the run in ``recipe.output_dir`` from its newest checkpoint.

        Raises:
            UserError: whatever does not fit together in recipe, data and weights.
        """
        started = time.perf_counter()
        quiet_libraries()
        if recipe.parallel != ParallelPlan():
            raise UserError("parallel: a run has one process in this version; remove the key")
        self.recipe = recipe
        self.folder = RunFolder(recipe)
        self.device = use_device(recipe.train)
        load_scorer(recipe.evaluation.scorer if recipe.evaluation else None)  # a mistake in it comes before the work
        self.resumed = self.last_checkpoint = self.folder.checkpoint_to_resume() if resume else None
        self.model, self.processor = self._build()
        self.ops = use_ops(self.model, recipe.model.ops)
        self.compiled = self._compiled()
        self.optimizer = build_optimizer(self.model, recipe.train.optimizer)
        state = read_state(self.resumed, self.model, self.optimizer, self.device) if self.resumed else TrainingState()
        self.step, self.steps_without_targets = state.step, state.steps_without_targets
        self.loader, self.heldout = self._open_data(state)
        self.data_state = state.data
        self.meter, self.stopwatch = LossMeter(), Stopwatch()
        self._started = started - state.seconds

    def _build(self) -> tuple[OmniModel, OmniProcessor]:
        checkpoint, freeze = self.resumed, self.recipe.model.freeze
        model, processor = load_checkpoint(checkpoint, freeze) if checkpoint else build_from_recipe(self.recipe)
        require_heads(self.recipe, model.decoders)
        model.to(self.device).train()
        return model, processor

    def _compiled(self) -> CompiledBlocks | None:
        settings = self.recipe.train.compile
        if not settings.enabled:
            return None
        return compile_blocks(self.model.foundation, max_recompiles=settings.max_recompiles)

    def _open_data(self, state: TrainingState) -> tuple[StepLoader, list[RowSource]]:
        data = self.recipe.data
        loader = build_dataloader(
            data,
            self.processor,
            seed=self.recipe.train.seed,
            state=state.data,
            alone=not self.model.runner.contract.packs,
            slots=self.recipe.train.micro_batches,
        )
        if self.resumed:
            require_same_rows(state.rows, loader.order.lengths, self.folder.path)
        heldout = open_sources(data.heldout)
        require_usable([*loader.sources, *heldout], self.processor)
        return loader, heldout

    def fit(self) -> RunSummary:
        """Train to the last step (or Ctrl-C), save, evaluate.

        Raises:
            NonFiniteError: a loss or gradient is not finite.
            UserError: data turned out to be unusable; the steps done are saved.
            TrainingError: so they are where a data process was killed.
        """
        train = self.recipe.train
        self.folder.open(resumed=self.resumed is not None)
        show_components(component_rows(self.model, self.ops))
        show_contract(self.model.runner.contract, in_full=False)
        if self.compiled is not None:
            console.print(f"compiled block by block: {len(self.compiled.names)} blocks of the foundation")
        metrics = MetricsFile(self.folder.path / "metrics.jsonl", resume_step=self.step)
        self.stopwatch = Stopwatch()
        with (
            _settled_objects_uncollected(),
            Interrupt() as interrupt,
            StepProgress(train.steps, self.step) as progress,
            contextlib.closing(iter(self.loader)) as steps,
        ):
            while self.step < train.steps and not interrupt.requested:
                batch = self._next_batch(steps)
                loss, norm = self.train_step(batch)
                self.data_state = self.loader.state()
                progress.update(self.step)
                if self.step % train.log_every == 0 or self.step == train.steps:
                    line = self._metrics(loss, norm)
                    metrics.write(line)
                    progress.update(self.step, _status(line))
                if train.save_every and self.step % train.save_every == 0 and self.step < train.steps:
                    self._save()
            checkpoint = self._save()
        if interrupt.requested:
            console.print(
                f"interrupted at step {self.step}; saved {checkpoint}; `omnitrain run ... --resume` continues"
            )
            return RunSummary(self.step, True, checkpoint, {})
        return RunSummary(self.step, False, checkpoint, self._evaluate())

    def _next_batch(self, steps: Iterator[tuple[Pack, ...]]) -> tuple[Pack, ...]:
        """The packs of a step. Where the data fail, the steps done are saved first."""
        waiting = time.perf_counter()
        try:
            batch = next(steps)
        except (UserError, TrainingError):
            if self.step:
                console.print(f"the data failed at step {self.step + 1}; saved {self._save()}")
            raise
        self.stopwatch.add(sum(pack.num_tokens for pack in batch), time.perf_counter() - waiting)
        return batch

    def train_step(self, batch: Sequence[Pack]) -> tuple[float, float]:
        """One optimizer step over ``batch``.

        Every head's loss is its sum over the whole batch, divided once by the batch's number of predicted tokens: how
        samples are spread over packs does not show.

        Returns:
            The total loss and the gradient norm before clipping.

        Raises:
            NonFiniteError: before the update; the message names the samples.
        """
        settings, weights = self.recipe.train.optimizer, self.recipe.train.loss_weights
        counts = _total_counts(batch)
        total = torch.zeros((), device=self.device)
        for pack in batch:
            pack = pack.to(self.device)
            losses = self.model(pack).losses
            terms = [weights.get(n, 1.0) * term.sum / counts[n] for n, term in losses.items() if counts[n]]
            if terms:
                loss = torch.stack(terms).sum()
                loss.backward()
                total += loss.detach()
            self.meter.add(pack, losses)
        if self.compiled is not None:
            self.compiled.check()
        norm = clip_gradients(self.model.parameters(), settings.max_grad_norm)
        loss_value, norm_value = total.item(), norm.item()
        if not (torch.isfinite(total) and torch.isfinite(norm)):
            ids = [sample for pack in batch for sample in pack.info.ids]
            raise NonFiniteError(f"step {self.step + 1}: loss {loss_value}, gradient norm {norm_value}; samples {ids}")
        if sum(counts.values()):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.recipe.train.steps, settings)
            self.optimizer.step()
        else:
            self.steps_without_targets += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss_value, norm_value

    def _metrics(self, loss: float, norm: float) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            **self.meter.read(),
            **self.stopwatch.read(),
            "memory_mb": peak_memory_mb(self.device),
            "rejected": len(self.loader.rejected),
            "steps_without_targets": self.steps_without_targets,
            "recompiles": self.compiled.recompiles if self.compiled else 0,
        }

    def _save(self) -> Path:
        if self.last_checkpoint is None or self.last_checkpoint != self.folder.store.folder_of(self.step):
            self.last_checkpoint = self.folder.store.save(self.step, self._write)
            self.folder.list_rejected(self.loader.rejected.values())
        return self.last_checkpoint

    def _write(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        seconds = time.perf_counter() - self._started
        rows = self.loader.order.lengths
        state = TrainingState(self.step, seconds, self.steps_without_targets, self.data_state, rows)
        write_state(folder, state, self.model, self.optimizer, self.device)

    def _evaluate(self) -> dict[str, float]:
        if self.recipe.evaluation is None:
            return {}
        eager = self.compiled.paused() if self.compiled else contextlib.nullcontext()
        with console.status("evaluation") as status, eager:
            result = evaluate(self.model, self.processor, self.heldout, self.recipe, status.update)
        scores = result.scores | {"seconds": time.perf_counter() - self._started}
        written = self.folder.write_scores(scores | {"losses": result.losses})
        page = save_samples(result.answers, self.folder.path / "samples", self.recipe.evaluation.saved_samples)
        show_scores(scores, title=f"{len(result.answers)} held-out answers")
        skipped = [*self.loader.rejected.values(), *result.rejected]
        listed = self.folder.list_rejected(skipped)
        console.print(f"scores: {written}\nsamples: {page}")
        if skipped:
            console.print(f"rows skipped: {len(skipped)}, listed in {listed}")
        return scores


@contextlib.contextmanager
def _settled_objects_uncollected() -> Iterator[None]:
    """Imports and models are half a million objects; the garbage collector need not walk them during training."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _total_counts(batch: Sequence[Pack]) -> dict[str, int]:
    """Predicted tokens per head over all packs of a step."""
    totals: dict[str, int] = {}
    for pack in batch:
        for name, number in pack.loss_counts().items():
            totals[name] = totals.get(name, 0) + number
    return totals


def _status(line: dict[str, Any]) -> str:
    heads = "  ".join(f"{name} {head['loss']:.3f}" for name, head in line["heads"].items() if head["tokens"])
    return f"loss {line['loss']:.3f}  {heads}  {line['tokens_per_second']:,.0f} tokens/s"
