"""``Trainer(recipe).fit()``: the training loop."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from omnitrain.data.loading.loader import StepLoader
from omnitrain.errors import TrainingError, UserError
from omnitrain.garbage import only_new_garbage
from omnitrain.models.omni.summary import component_rows
from omnitrain.ops.draws import mixed_seed, seed_device
from omnitrain.optim.adamw import learning_rate
from omnitrain.optim.ema import AveragedWeights
from omnitrain.optim.gradients import clip_gradients
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.schedule.executor import OnOutput, OnPhase
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.recipe import Recipe
from omnitrain.report.run_record import write_facts
from omnitrain.report.write import report_at_end
from omnitrain.train.callbacks import Callback, CallbackError, Callbacks, load_callbacks
from omnitrain.train.device import mixed_precision, use_device
from omnitrain.train.epochs import counts_samples, in_steps
from omnitrain.train.evaluate.evaluate import Evaluator, load_scorer
from omnitrain.train.evaluations import Evaluations
from omnitrain.train.interrupt import Interrupt
from omnitrain.train.lr_groups import optimizer_of
from omnitrain.train.measures import RunMeasures
from omnitrain.train.metrics import display
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.costs import WAIT_FOR_DATA
from omnitrain.train.metrics.memory_estimate import kept_by_source
from omnitrain.train.metrics.meter import MetricsFile, PackLosses, StopWatcher
from omnitrain.train.metrics.progress import StepProgress, values_shown
from omnitrain.train.metrics.step_timing import Stopwatch, encoder_metrics
from omnitrain.train.metrics.trackers import open_trackers, require_trackers
from omnitrain.train.micro_batches import check_micro_batches
from omnitrain.train.nonfinite import NonFiniteError, Origin, OriginFinder, not_finite_error
from omnitrain.train.prepare import open_data, prepare_model
from omnitrain.train.process_groups import Ranks, join_ranks
from omnitrain.train.run_state.run_folder import Resume, RunFolder, require_free, require_same_rows
from omnitrain.train.run_state.save import Saver, TrainingState, checkpoint_bytes, load_optimizers, read_state
from omnitrain.train.run_state.snapshot import EMA_FOLDER, OPTIMIZER
from omnitrain.train.saves import Saves


@dataclass
class _Fit:
    """Files and streams of a :meth:`Trainer.fit`. Only the first rank has a file of metrics and watches for a stop."""

    interrupt: Interrupt
    progress: StepProgress
    steps: Iterator[StepBatch]
    first: list[StepBatch]  # of the steps, until it is taken
    metrics: MetricsFile | None
    early: StopWatcher | None
    evaluations: Evaluations
    interrupted: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class RunSummary:
    """How a run ended."""

    step: int  # optimizer steps done
    interrupted: bool  # Ctrl-C or SIGTERM ended it early
    checkpoint: Path  # the last checkpoint
    scores: dict[str, float]  # scores of the evaluation; empty without an evaluation
    is_terminated: bool = False  # it was SIGTERM: a scheduler should start the run again
    # why the run ended before its last step, by early stopping or a callback. None: it did not
    stopped: str | None = None


class Trainer:
    """Trains the model of a recipe.

    Attributes:
        recipe: the recipe, with measured values in place of `auto`.
        folder: the folder that the run writes to.
        model: the model, ready to train.
        processor: turns data rows into samples.
        loader: the training data, step by step.
        evaluator: evaluates the model on held-out data; None: the recipe has no evaluation.
        optimizer: AdamW, or Muon and AdamW.
        ema: averages of the weights; None: the recipe has no `train.ema`.
        measures: what the run counts and measures.
        saves: its checkpoints.
    """

    device: torch.device
    ranks: Ranks
    folder: RunFolder
    loader: StepLoader

    def __init__(self, recipe: Recipe, *, resume: Resume = False, callbacks: Sequence[Callback] = ()) -> None:
        """Build everything; nothing is written before :meth:`fit`.

        ``resume``: continue the run in ``recipe.output_dir`` from its newest checkpoint; "auto": from the newest one
        that is not damaged, or start it. ``callbacks``, the same on all ranks, are called before those of
        ``train.callbacks``. Raises UserError: recipe, data and weights do not fit together.
        """
        if not isinstance(recipe, Recipe):
            raise UserError(f"recipe: found a {type(recipe).__name__}; expected a Recipe, as Recipe.load(NAME) returns")
        started = time.perf_counter()
        recipe = self._join(recipe, callbacks)
        self.resumed, self._continues = self.folder.checkpoint_to_resume(self.ranks.peers, resume), resume == "auto"
        saved, trained = read_state(self.resumed) if self.resumed else (TrainingState(), [])
        prepared = prepare_model(recipe, self.ranks, self.device, self.resumed)
        self.model, self.processor, self.ops = prepared.model, prepared.processor, prepared.ops
        self.layout, self.compiled = prepared.layout, prepared.compiled
        self.optimizer = optimizer_of(self.model, recipe.train.optimizer, self.layout)
        self._parameters = list(self.model.parameters())  # walking the modules in each step takes long
        self.ema = AveragedWeights(self.optimizer, recipe.train.ema.decay) if recipe.train.ema else None
        optimizers = {OPTIMIZER: self.optimizer} | ({EMA_FOLDER: self.ema} if self.ema else {})
        if self.resumed:
            load_optimizers(self.resumed, self.model, optimizers, trained)
        folder = self.folder.path
        self.measures = RunMeasures(recipe, prepared, self.ranks, self.device, folder, saved, started)
        self.recipe = self.folder.recipe = self.measures.settled_in(recipe)
        self._open_data(recipe, saved)
        saved_parts = self.model, self.processor, optimizers
        self.saver = Saver(self.folder, self.ranks, *saved_parts, in_background=recipe.train.save.background)
        self.watch = self.ranks.watch(recipe.train.stall_seconds)
        self.saves = Saves(recipe, self.folder, self.measures, self.saver, self._tell, self._paused)
        self._stop_reason: str | None = None
        self._scores: dict[int, dict[str, float]] = {}  # steps done -> their scores
        self._upcoming: StepBatch | UserError | TrainingError | None = None

    def _join(self, recipe: Recipe, callbacks: Sequence[Callback]) -> Recipe:
        """Join the ranks, and check what needs no model. Return the recipe in steps and packs."""
        display.quiet_libraries()
        self.recipe, self.device = recipe, use_device(recipe.train)
        is_mixed = mixed_precision(recipe.train, self.device.type) is True
        self.ranks = join_ranks(recipe.parallel, self.device, lays_out=is_mixed)
        if counts_samples(recipe):
            recipe = self.ranks.peers.of_first(self.ranks.first(lambda: in_steps(recipe)) or recipe)
        self.folder = RunFolder(recipe)
        self._advice = check_micro_batches(recipe, self.ranks.state_of_main)
        self.ranks.first(lambda: require_free(self.folder.path))  # opening it checks again, perhaps minutes later
        load_scorer(recipe.evaluation.scorer if recipe.evaluation else None)
        require_trackers(recipe)
        self.callbacks = Callbacks([*callbacks, *load_callbacks(recipe.train.callbacks)], self.ranks.peers)
        return recipe

    def _open_data(self, recipe: Recipe, saved: TrainingState) -> None:
        costs = self.measures.encoder_costs.of_planner()
        self.loader, heldout = open_data(recipe, self.model, self.processor, self.ranks, saved.data, costs)
        if self.resumed:
            require_same_rows(saved.rows, self.loader.order.lengths, self.folder.path)
        self.evaluator = None
        if recipe.evaluation:
            self.evaluator = Evaluator(self.model, self.processor, heldout, self.recipe, self.ranks)
        self.measures.follow(self.loader)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.measures.step

    @property
    def samples(self) -> int:
        """Samples in these steps."""
        return self.measures.samples

    @property
    def last_checkpoint(self) -> Path | None:
        """The last checkpoint that is known to be complete. None: there is none."""
        return self.folder.store.last

    def fit(self) -> RunSummary:
        """Train to the last step (or Ctrl-C), save, evaluate. All ranks must call it.

        A second call continues a run that Ctrl-C ended. A resumed run that is finished does not change. Raises, after
        the finished steps are saved: NonFiniteError: a loss or gradient is not finite; UserError: the data cannot be
        used; TrainingError: a data process was killed; CallbackError: a callback raised on some rank.
        """
        if (finished := self._finished()) is not None:
            return finished
        self._show()
        with self._opened() as fit:
            self._tell("on_start")
            fit.stopped = self.ranks.peers.any(self._stop_reason is not None)
            while self.step < self.recipe.train.steps and not (fit.interrupted or fit.stopped):
                batch = fit.first.pop() if fit.first else self._next_batch(fit.steps)
                self._upcoming = self._fetched(fit.steps) if self._looks_ahead() else None
                loss, norm = self._measured_step(batch)
                self.measures.data = self.loader.state()
                self.saves.rehearse()
                self._tell("on_step", loss, norm)
                self._log(fit, loss, norm)
                is_stopped = self._stop_reason is not None
                fit.interrupted, fit.stopped = self.saves.after_step(lambda: fit.interrupt.requested, is_stopped)
            summary = self._ended(fit, self.saves.save())
            self._tell("on_end", summary)
        if summary.interrupted:
            steps = f"step {self.step} of {self.recipe.train.steps}"
            console.print(f"interrupted at {steps}; saved {summary.checkpoint}", soft_wrap=True)
        return summary

    def _finished(self) -> RunSummary | None:
        """Return how a resumed run ended; None: it goes on."""
        train = self.recipe.train
        if self.resumed is None or (self.step < train.steps and train.early_stopping is None):
            return None
        finished = self.ranks.first(self.folder.finished)
        if not self.ranks.peers.any(finished is not None):
            return None
        console.print(finished, soft_wrap=True)
        return RunSummary(self.step, False, self.resumed, {})

    @contextlib.contextmanager
    def _opened(self) -> Iterator[_Fit]:
        """Take the first packs, then open the folder, and close everything at the end."""
        train, self._upcoming = self.recipe.train, None
        self.measures.stopwatch = Stopwatch()
        self.saves.times.restart(self.step)
        self.measures.encoder_costs.restart(self.step)
        if self.watch.is_closed:
            self.watch = self.ranks.watch(train.stall_seconds)
        gc.collect()
        with (
            Interrupt() as interrupt,
            only_new_garbage(),
            StepProgress(console, train.steps, self.step) as progress,
            contextlib.closing(iter(self.loader)) as steps,
            contextlib.ExitStack() as closing,
            self.watch,
        ):
            self.watch.follow(self.model)
            # Unusable data raise here, before the run writes anything.
            first = [self._next_batch(steps)] if self.step < train.steps else []
            closing.callback(self.folder.close)
            closing.enter_context(self.saver)
            if train.report and self.ranks.is_first:
                closing.push(report_at_end(self.folder.path, partial(console.print, markup=False, soft_wrap=True)))
            if (metrics := self.ranks.first(self._open_folder)) is not None:
                closing.enter_context(metrics)
            self.folder.require_shared(self.ranks.peers)
            early = None
            if metrics is not None and train.early_stopping is not None:
                early = StopWatcher(train.early_stopping, metrics.earlier)
            self._stop_reason = early.reason if early else None
            of_fit = self.measures, interrupt, metrics, self._tell, self._paused, self._scores
            evaluations = Evaluations(self.evaluator, self.recipe, self.folder, self.ema, *of_fit)
            yield _Fit(interrupt, progress, steps, first, metrics, early, evaluations)

    def _open_folder(self) -> MetricsFile:
        self.folder.open(
            self._continues or self.last_checkpoint is not None, checkpoint_bytes(self.model, self.ema is not None)
        )
        write_facts(self.folder.path, self.model, self.ops, self.layout)
        trackers = open_trackers(self.recipe, self.folder.path, self.step)
        return MetricsFile(self.folder.path / "metrics.jsonl", self.step, trackers)

    def _log(self, fit: _Fit, loss: float, norm: float) -> None:
        """Show the step, and write a line of metrics if it is due."""
        if not self.recipe.writes_metrics(self.step):
            fit.progress.advance(self.step, loss)
            return
        line = self.measures.metrics(norm)
        fit.evaluations.on_the_way(line)
        self._tell("on_log", line)
        if fit.early:
            fit.early.add(line)
            self._stop_reason = self._stop_reason or fit.early.reason
        if fit.metrics is not None:
            fit.metrics.write(line)
        self.measures.line = line
        fit.progress.advance(self.step, loss, values_shown(line))

    def _ended(self, fit: _Fit, checkpoint: Path) -> RunSummary:
        """Say why and where the run ended, and evaluate it if it was not interrupted."""
        scores, reason = None, None
        if not fit.interrupted:
            reason = next(filter(None, self.ranks.peers.gather(self._stop_reason)), None) if fit.stopped else None
            if reason is not None and self.step < self.recipe.train.steps:
                console.print(f"stopped at step {self.step} of {self.recipe.train.steps}: {reason}", soft_wrap=True)
            console.print(f"saved {checkpoint}")
            scores = fit.evaluations.at_end()
        if scores is None:
            is_terminated = self.ranks.peers.any(fit.interrupt.is_terminated)
            return RunSummary(self.step, True, checkpoint, {}, is_terminated)
        return RunSummary(self.step, False, checkpoint, scores, stopped=reason)

    def stop(self, reason: str) -> None:
        """End the run after this step, on all ranks, as at its last step: print the ``reason``, save, evaluate."""
        self._stop_reason = self._stop_reason or reason

    def _paused(self, phase: Any) -> contextlib.AbstractContextManager[None]:
        return self.watch.paused(phase)

    def _tell(self, event: str, *arguments: Any) -> None:
        """Call the callbacks for an event. If one raises on any rank, save the finished steps first."""
        if not self.callbacks.has(event):
            return
        try:
            with self._paused("callbacks"):
                self.callbacks.call(event, self, *arguments)
        except CallbackError as error:
            saved = self.saves.saved_or_why_not("the steps so far") if self.step else "no step was done"
            raise CallbackError(f"{error}\n  {saved}") from error.__cause__

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[Callable[[], None]]:
        """Train without a run, and write nothing: each call of the yielded function is one step. All ranks call it."""
        with contextlib.closing(iter(self.loader)) as steps, self.watch:
            self.watch.follow(self.model)

            def step() -> None:
                with record_function(WAIT_FOR_DATA):
                    batch = self._next_batch(steps)
                    self._upcoming = self._fetched(steps) if self._looks_ahead() else None
                self.train_step(batch)
                self.measures.flops.add(batch)
                self.measures.encoder_metrics = encoder_metrics(self.model, batch.plan, {})

            yield step

    def _show(self) -> None:
        display.show_components(component_rows(self.model, self.ops))
        display.show_unused(self.model.config.unused_tensors)
        display.show_added_tokens(self.model)
        display.show_own_head(self.model.config)
        display.show_contract(self.model.runner.contract, in_full=False)
        if self.layout is not None:
            console.print(self.layout.table(self.model))
            for line in self._advice:
                console.print(f"advice: {line}", soft_wrap=True)
        else:
            console.print("every component computes in float32 (train.precision)")
        if self.compiled is not None:
            console.print(f"compiled block by block: {len(self.compiled.names)} blocks of the foundation")
        elif self.recipe.train.compile.enabled == "auto":
            console.print("no block is compiled: `train.compile: auto` compiles on CUDA, where the plan allows it")
        if self.device.type == "cuda":
            self.show_memory()
        if self.resumed is not None:
            left = max(0, self.recipe.train.steps - self.step)
            console.print(f"resumed from {self.resumed}: {self.step} steps are done, {left} are left")

    def show_memory(self) -> None:
        """Print the memory that full packs keep for their backward (one process without a plan)."""
        if self.ranks.state is None and self.compiled is None and self.model.runner.contract.packs:
            pack_tokens = self.recipe.data.pack_tokens
            if kept := kept_by_source(self.model, self.processor, self.loader.sources, pack_tokens):
                display.show_kept_memory(kept, pack_tokens)

    def _next_batch(self, steps: Iterator[StepBatch]) -> StepBatch:
        """Return the packs of a step. If the data fail on any rank, save the finished steps first."""
        self.watch.at(step=self.step + 1, phase="data")
        waiting = time.perf_counter()
        batch = self._upcoming or self._fetched(steps)
        if self.ranks.peers.any(not isinstance(batch, StepBatch)):
            if self.step:
                saved = self.saves.saved_or_why_not()
                console.print(f"the data failed at step {self.step + 1}; {saved}", soft_wrap=True)
            if isinstance(batch, StepBatch):
                raise TrainingError(f"step {self.step + 1}: the data failed on another rank")
            raise batch
        assert isinstance(batch, StepBatch)
        waited = self.measures.spans.data_waited = time.perf_counter() - waiting
        self.measures.stopwatch.add(batch.plan, waited)
        return batch

    def _fetched(self, steps: Iterator[StepBatch]) -> StepBatch | UserError | TrainingError:
        """Return the next packs of this rank, or why there are none."""
        try:
            return next(steps)
        except (UserError, TrainingError) as error:
            return error

    def _looks_ahead(self) -> bool:
        """Whether this rank takes the packs of the next step before this one, to encode some of their items."""
        return self.layout is not None and self.layout.encodes_ahead and self.step + 1 < self.recipe.train.steps

    def _measured_step(self, batch: StepBatch) -> tuple[float, float]:
        known = self.measures.settled
        try:
            with self.measures.measured(batch):
                loss, norm = self.train_step(batch)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}\n  {self.saves.before_failure()}") from None
        if (settled := self.measures.settled) != known:
            self.recipe = self.measures.settled_in(self.recipe)
            self.ranks.first(lambda: self.folder.save_recipe(self.recipe))
            for line in settled:
                if line not in known:
                    console.print(line)
        return loss, norm

    def train_step(self, batch: StepBatch) -> tuple[float, float]:
        """Return loss and gradient norm of a step, equal on all ranks; NonFiniteError: no weight changed."""
        settings, measures = self.recipe.train.optimizer, self.measures
        packs: list[PackLosses] = []
        part = self._accumulate(batch, self.watch.at, lambda pack, output: packs.append(PackLosses.of(pack, output)))
        if self.compiled is not None:
            self.compiled.check()
        self.watch.at(phase="optimizer")
        measures.spans.optimizer_begins()
        whole_norm = clip_gradients(self._parameters, settings.max_grad_norm)
        # The one time in a step that the host waits for the device.
        local_loss, norm = torch.stack([part.double(), whole_norm.to(part.device, torch.float64)]).tolist()
        loss = self.ranks.peers.sum(local_loss)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            mixed = mixed_precision(self.recipe.train, self.device.type) is True
            origin = self._origin_of_non_finite(batch)
            raise not_finite_error(self.step + 1, loss, norm, packs, origin, self.ranks.peers, self.recipe, mixed)
        if sum(batch.plan.loss_counts.values()):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.recipe.train.steps, settings, group["peak"])
            self.optimizer.step()
            if self.ema:
                self.ema.step()
            measures.routers.end()
        self.optimizer.zero_grad(set_to_none=True)
        measures.add(batch, loss, packs)
        return loss, norm

    def _accumulate(self, batch: StepBatch, on_phase: OnPhase, on_output: OnOutput | None = None) -> torch.Tensor:
        # The same in a resumed run, and on tensor parallel and pipeline ranks.
        seed_device(mixed_seed(self.recipe.train.seed, self.step, self.ranks.loss_peers.rank), self.device)
        return accumulate_gradients(
            self.model,
            batch,
            loss_weights=self.recipe.loss_weights,
            on_output=on_output,
            on_phase=on_phase,
            forward_context=self.measures.routing.forward_context,
            routers=self.measures.routers,
            recorder=self.measures.spans.recorder,
            upcoming=self._upcoming if isinstance(self._upcoming, StepBatch) else None,
        )

    def _origin_of_non_finite(self, batch: StepBatch) -> Origin | None:
        """Compute a step again, which gives the same values, and return where the first one is not finite."""
        finder, self._upcoming = OriginFinder(self.model), None  # the next step has no part in it

        def at(**position: Any) -> None:
            self.watch.at(**position)
            finder.at(**position)

        with finder.looking():
            self._accumulate(batch, at)
        self.optimizer.zero_grad(set_to_none=True)
        return finder.found
