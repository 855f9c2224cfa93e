"""``Trainer(recipe).fit()``: the training loop."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from omnitrain.data.loading.slots import merge_states, reasons_by_source, rejected_by_source
from omnitrain.errors import LostRankError, TrainingError, UserError
from omnitrain.models.omni.summary import component_rows
from omnitrain.ops.device import mixed_seed, seed_device
from omnitrain.optim.adamw import learning_rate
from omnitrain.optim.build import build_optimizer
from omnitrain.optim.gradients import clip_gradients
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.schedule.executor import OnOutput, OnPhase
from omnitrain.parallel.serving import serving
from omnitrain.parallel.step.item_costs import Measured
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.recipe import Recipe
from omnitrain.report.run_facts import write_facts
from omnitrain.report.write import report_at_end
from omnitrain.train.callbacks import Callback, CallbackError, Callbacks, load_callbacks
from omnitrain.train.data import open_data
from omnitrain.train.device import use_device
from omnitrain.train.encoder_costs import EncoderCosts
from omnitrain.train.epochs import counts_samples, in_steps
from omnitrain.train.evaluate.evaluate import Evaluation, Evaluator, load_scorer
from omnitrain.train.evaluate.results import write_results
from omnitrain.train.experts import ExpertsOfRun
from omnitrain.train.interrupt import Interrupt, StoppedError
from omnitrain.train.lr_groups import decays_of, matrices_of, peaks_of
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.costs import WAIT_FOR_DATA
from omnitrain.train.metrics.display import (
    quiet_libraries,
    show_added_tokens,
    show_components,
    show_contract,
    show_kept_memory,
    show_own_head,
    show_unused,
)
from omnitrain.train.metrics.early_stopping import StopWatcher
from omnitrain.train.metrics.encoders import encoder_metrics
from omnitrain.train.metrics.flops import run_flops
from omnitrain.train.metrics.memory_estimate import kept_by_source
from omnitrain.train.metrics.meter import LossMeter, MeanLoss, MetricsFile, PackLosses, memory_metrics
from omnitrain.train.metrics.progress import Activity, StepProgress, values_shown
from omnitrain.train.metrics.step_timing import StepSpans
from omnitrain.train.metrics.throughput import Stopwatch
from omnitrain.train.metrics.trackers import open_trackers, require_trackers
from omnitrain.train.micro_batches import check_micro_batches
from omnitrain.train.nonfinite import NonFiniteError, Origin, OriginFinder, not_finite_error, unsound_parameters
from omnitrain.train.precision import compute_dtype, mixed_precision
from omnitrain.train.prepare import prepare_model
from omnitrain.train.process_groups import join_ranks
from omnitrain.train.run_state.resume import require_same_rows
from omnitrain.train.run_state.run_folder import Resume, RunFolder
from omnitrain.train.run_state.save import Saver, checkpoint_bytes
from omnitrain.train.run_state.save_times import SaveTimes
from omnitrain.train.run_state.state import TrainingState, read_state

T = TypeVar("T")


@dataclass
class _Fit:
    """What a call of :meth:`Trainer.fit` opens. Only the first rank has a file of metrics and watches for a stop."""

    interrupt: Interrupt
    progress: StepProgress
    steps: Iterator[StepBatch]
    first: list[StepBatch]  # of the steps, until it is taken
    metrics: MetricsFile | None
    early: StopWatcher | None
    heldout_losses: dict[str, Any] | None = None  # of the last step, if they were due


@dataclass(frozen=True)
class RunSummary:
    """How a run ended.

    Attributes:
        step: optimizer steps done.
        interrupted: Ctrl-C or SIGTERM ended it early.
        checkpoint: the last checkpoint.
        scores: scores of the evaluation; empty without an evaluation.
        is_terminated: it was SIGTERM: a scheduler should start the run again.
        stopped: why the run ended before its last step, by early stopping or a callback. None: it did not.
    """

    step: int
    interrupted: bool
    checkpoint: Path
    scores: dict[str, float]
    is_terminated: bool = False
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
        step: optimizer steps done.
        samples: samples in these steps.
    """

    def __init__(self, recipe: Recipe, *, resume: Resume = False, callbacks: Sequence[Callback] = ()) -> None:
        """Build everything; nothing is written before :meth:`fit`.

        Args:
            recipe: the recipe of the run.
            resume: continue the run in ``recipe.output_dir`` from its newest checkpoint. "auto": from the newest one
                that is not damaged; if it has none, start it.
            callbacks: called before those of ``train.callbacks``; all ranks must pass the same.

        Raises:
            UserError: recipe, data and weights do not fit together.
        """
        if not isinstance(recipe, Recipe):
            raise UserError(f"recipe: found a {type(recipe).__name__}; expected a Recipe, as Recipe.load(NAME) returns")
        started = time.perf_counter()
        quiet_libraries()
        self.recipe = recipe
        self.device = use_device(recipe.train)
        is_mixed = mixed_precision(recipe.train, self.device.type) is True
        self.ranks = join_ranks(recipe.parallel, self.device, lays_out=is_mixed)
        if counts_samples(recipe):
            recipe = self.recipe = self.ranks.of_first(self.ranks.first(lambda: in_steps(recipe)) or recipe)
        self.folder = RunFolder(recipe)
        self._advice = check_micro_batches(recipe, self.ranks.state_of_main)
        self.ranks.first(self.folder.require_free)
        load_scorer(recipe.evaluation.scorer if recipe.evaluation else None)  # fails before the expensive steps
        require_trackers(recipe)
        self.callbacks = Callbacks([*callbacks, *load_callbacks(recipe.train.callbacks)], self.ranks.peers)
        self.resumed = self.folder.checkpoint_to_resume(self.ranks.peers, resume)
        self._continues = resume == "auto"
        prepared = prepare_model(recipe, self.ranks, self.device, self.resumed)
        self.model, self.processor, self.ops = prepared.model, prepared.processor, prepared.ops
        self.layout, self.compiled = prepared.layout, prepared.compiled
        dtype = compute_dtype(recipe.parallel, mixed_precision(recipe.train, self.device.type))
        self.flops = run_flops(prepared.flops, self.layout, self.device, dtype)
        offloaded = self.layout.offloaded(self.model) if self.layout is not None else ()
        settings = recipe.train.optimizer
        self.optimizer = build_optimizer(
            self.model,
            settings,
            offloaded,
            peaks_of(self.model, settings),
            decays_of(self.model, settings),
            matrices_of(self.model, settings),
        )
        self._parameters = list(self.model.parameters())  # walking the modules in each step takes long
        state = read_state(self.resumed, self.model, self.optimizer) if self.resumed else TrainingState()
        self.step, self.steps_without_targets, self.samples = state.step, state.steps_without_targets, state.samples
        self.spans = StepSpans(self.model, self.device, recipe, self.folder.path / "trace")
        self.encoder_metrics: dict[str, Any] = {}
        self.experts = ExpertsOfRun(self.model, recipe, self.ranks, self.spans, state)
        self.encoder_costs = EncoderCosts(self.model, self.ranks, state)
        self.recipe = self.folder.recipe = self._with_what_was_measured()
        costs = self.encoder_costs.of_planner()
        self.loader, heldout = open_data(recipe, self.model, self.processor, self.ranks, state.data, costs)
        if self.resumed:
            require_same_rows(state.rows, self.loader.order.lengths, self.folder.path)
        self.evaluator = (
            Evaluator(self.model, self.processor, heldout, self.recipe, self.ranks.loss_peers)
            if recipe.evaluation
            else None
        )
        self.data_state = self.loader.state()
        self.meter, self.stopwatch = LossMeter(), Stopwatch()
        self.mean_loss = MeanLoss(state.mean_loss, state.loss_tokens)
        if self.ranks.meter_peers.rank == 0:
            self.meter.continue_from(state.losses)
        in_background = recipe.train.async_save
        saved = self.model, self.processor, self.optimizer
        self.saver = Saver(self.folder, self.ranks, *saved, in_background=in_background)
        self.save_times = SaveTimes(recipe, self.step)
        self._line: dict[str, Any] = {}  # the last line of metrics
        self._stop_reason: str | None = None
        self._scored: dict[int, dict[str, float]] = {}  # steps done -> scores of the last evaluation
        self._upcoming: StepBatch | UserError | TrainingError | None = None
        self.watch = self.ranks.watch(recipe.train.stall_seconds)
        self._started = started - state.seconds

    @property
    def last_checkpoint(self) -> Path | None:
        """The last checkpoint that is known to be complete. None: there is none."""
        return self.folder.store.last

    def fit(self) -> RunSummary:
        """Train to the last step (or Ctrl-C), save, evaluate. All ranks must call it.

        A second call continues a run that Ctrl-C ended. A resumed run that is finished does not change.

        Raises:
            NonFiniteError: a loss or gradient is not finite; the finished steps are saved.
            UserError: the data cannot be used; the finished steps are saved.
            TrainingError: a data process was killed; the finished steps are saved.
            CallbackError: a callback raised on some rank; the finished steps are saved.
        """
        if (finished := self._finished()) is not None:
            return finished
        self._show()
        self.stopwatch, self._upcoming = Stopwatch(), None
        self.save_times.restart(self.step)
        self.encoder_costs.restart(self.step)
        if self.watch.is_closed:
            self.watch = self.ranks.watch(self.recipe.train.stall_seconds)
        with self._opened() as fit:
            self._tell("on_start")
            interrupted, stopped = self._train(fit)
            checkpoint = self._save()
            summary = None if interrupted else self._evaluated(fit, checkpoint, stopped)
            if summary is None:
                is_terminated = self.ranks.peers.any(fit.interrupt.is_terminated)
                summary = RunSummary(self.step, True, checkpoint, {}, is_terminated)
            self._tell("on_end", summary)
        if summary.interrupted:
            steps = f"step {self.step} of {self.recipe.train.steps}"
            console.print(f"interrupted at {steps}; saved {checkpoint}", soft_wrap=True)
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
        train = self.recipe.train
        with (
            Interrupt() as interrupt,
            _settled_objects_uncollected(),
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
            yield _Fit(interrupt, progress, steps, first, metrics, early)

    def _train(self, fit: _Fit) -> tuple[bool, bool]:
        """Train to the last step. Return whether the run was interrupted before it, and whether it was stopped."""
        interrupted, stopped = False, self.ranks.peers.any(self._stop_reason is not None)
        while self.step < self.recipe.train.steps and not (interrupted or stopped):
            batch = fit.first.pop() if fit.first else self._next_batch(fit.steps)
            self._upcoming = self._fetched(fit.steps) if self._looks_ahead() else None
            loss, norm = self._measured_step(batch)
            self.data_state = self.loader.state()
            if self.save_times.before_end and not self.saver.is_rehearsed:
                self.saver.rehearse(self._state())
            self._tell("on_step", loss, norm)
            fit.heldout_losses = self._log(fit, loss, norm)
            interrupted, stopped = self._save_if_due(fit.interrupt)
        return interrupted, stopped

    def _evaluated(self, fit: _Fit, checkpoint: Path, stopped: bool) -> RunSummary | None:
        """Say why and where the run ended, and evaluate; None: the evaluation was interrupted."""
        reason = next(filter(None, self.ranks.peers.gather(self._stop_reason)), None) if stopped else None
        if reason is not None and self.step < self.recipe.train.steps:
            console.print(f"stopped at step {self.step} of {self.recipe.train.steps}: {reason}", soft_wrap=True)
        console.print(f"saved {checkpoint}")
        with contextlib.suppress(StoppedError), self.watch.paused("evaluate"):
            scores = self._scored.get(self.step) or self._evaluate(fit.interrupt, fit.heldout_losses, fit.metrics)
            if fit.metrics is not None and scores:
                fit.metrics.track(self.step, {"scores": scores})
            return RunSummary(self.step, False, checkpoint, scores, stopped=reason)
        return None

    def _log(self, fit: _Fit, loss: float, norm: float) -> dict[str, Any] | None:
        """Show the step, and write a line of metrics if it is due. Return the held-out losses of this step, if any."""
        if not self.recipe.writes_metrics(self.step):
            fit.progress.advance(self.step, loss)
            return None
        line = self._metrics(norm)
        if (heldout_losses := self._heldout_losses(fit.interrupt)) is not None:
            line["heldout"] = heldout_losses
            if self.recipe.evaluates(self.step) and self.step < self.recipe.train.steps:
                line |= self._scores_on_the_way(fit.interrupt, heldout_losses, fit.metrics)
            else:
                self._tell("on_evaluate", Evaluation(heldout_losses, [], {}, []))
        self._tell("on_log", line)
        if fit.early:
            fit.early.add(line)
            self._stop_reason = self._stop_reason or fit.early.reason
        if fit.metrics is not None:
            fit.metrics.write(line)
        self._line = line
        fit.progress.advance(self.step, loss, values_shown(line))
        return heldout_losses

    def _save_if_due(self, interrupt: Interrupt) -> tuple[bool, bool]:
        """Save, or finish a save, where all ranks agree. Return whether the run is interrupted, and whether stopped."""
        flags = [
            self._save_is_due(),
            interrupt.requested,
            self._stop_reason is not None,
            self.saver.is_writing,
            self.saver.has_failed,
        ]
        is_due, interrupted, stopped, is_writing, has_failed = self.ranks.peers.any_of_each(flags)
        if has_failed or not is_writing:
            self._finish_save()
        if is_due and not (interrupted or stopped):
            self._save(waits=False)
            interrupted = self.ranks.peers.any(interrupt.requested)
        return interrupted, stopped

    def stop(self, reason: str) -> None:
        """End the run after this step, on all ranks, as at its last step: save, then evaluate. Any rank may call it.

        Args:
            reason: what to print.
        """
        self._stop_reason = self._stop_reason or reason

    def _tell(self, event: str, *arguments: Any) -> None:
        """Call the callbacks for an event. If one raises on any rank, save the finished steps first."""
        if not self.callbacks.has(event):
            return
        try:
            with self.watch.paused("callbacks"):
                self.callbacks.call(event, self, *arguments)
        except CallbackError as error:
            saved = self._saved_or_why_not("the steps so far") if self.step else "no step was done"
            raise CallbackError(f"{error}\n  {saved}") from error.__cause__

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[Callable[[], None]]:
        """Train without a run: each call of what is yielded is one step, and nothing is written. All ranks call it."""
        with contextlib.closing(iter(self.loader)) as steps, self.watch:
            self.watch.follow(self.model)

            def step() -> None:
                with record_function(WAIT_FOR_DATA):
                    batch = self._next_batch(steps)
                    self._upcoming = self._fetched(steps) if self._looks_ahead() else None
                self.train_step(batch)
                self.flops.add(batch)
                self.encoder_metrics = encoder_metrics(self.model, batch.plan, {})

            yield step

    def _open_folder(self) -> MetricsFile:
        self.folder.open(self._continues or self.last_checkpoint is not None, checkpoint_bytes(self.model))
        write_facts(self.folder.path, self.model, self.ops, self.layout)
        trackers = open_trackers(self.recipe, self.folder.path, self.step)
        return MetricsFile(self.folder.path / "metrics.jsonl", self.step, trackers)

    def _show(self) -> None:
        show_components(component_rows(self.model, self.ops))
        show_unused(self.model.config.unused_tensors)
        show_added_tokens(self.model)
        show_own_head(self.model.config)
        show_contract(self.model.runner.contract, in_full=False)
        if self.layout is not None:
            console.print(self.layout.table(self.model))
            for line in self._advice:
                console.print(f"advice: {line}", soft_wrap=True)
        else:
            console.print("every component computes in float32 (train.precision)")
        if self.compiled is not None:
            console.print(f"compiled block by block: {len(self.compiled.names)} blocks of the foundation")
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
                show_kept_memory(kept, pack_tokens)

    def _next_batch(self, steps: Iterator[StepBatch]) -> StepBatch:
        """Return the packs of a step. If the data fail on any rank, save the finished steps first."""
        self.watch.at(step=self.step + 1, phase="data")
        waiting = time.perf_counter()
        batch = self._upcoming or self._fetched(steps)
        if self.ranks.peers.any(not isinstance(batch, StepBatch)):
            if self.step:
                console.print(f"the data failed at step {self.step + 1}; {self._saved_or_why_not()}", soft_wrap=True)
            if isinstance(batch, StepBatch):
                raise TrainingError(f"step {self.step + 1}: the data failed on another rank")
            raise batch
        assert isinstance(batch, StepBatch)
        self.spans.data_waited = time.perf_counter() - waiting
        self.stopwatch.add(batch.plan, self.spans.data_waited)
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
        chunks, costs = self.experts.chunks.settled, self.encoder_costs.settled
        is_measured = self.encoder_costs.measures(self.step + 1)
        try:
            with (
                self.spans.step(self.step + 1, self.ranks.peers.rank, is_measured=is_measured),
                self.experts.measured(int(batch.plan.tokens.sum())),
            ):
                loss, norm = self.train_step(batch)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}\n  {self._save_before_failure()}") from None
        self.flops.add(batch)
        if self.recipe.writes_metrics(self.step):
            self.encoder_metrics = encoder_metrics(self.model, batch.plan, self.spans.of_encoders(self.ranks.peers))
        if is_measured:
            self.encoder_costs.add(self.step, batch.plan, self.spans.last)
        if (self.experts.chunks.settled, self.encoder_costs.settled) != (chunks, costs):
            self.recipe = self._with_what_was_measured()
            self.ranks.first(lambda: self.folder.save_recipe(self.recipe))
            for name, number in (self.experts.chunks.settled or {}).items() if chunks is None else ():
                console.print(f"expert_chunks of {name}: {number} was the fastest number, and stays")
            measured = self.encoder_costs.settled or Measured()
            for name, cost in measured.quadratic.items() if costs is None else ():
                console.print(
                    f"quadratic_cost of {name}: {cost:.3g} was measured; it counts from step "
                    f"{self.encoder_costs.unused_until + 1} on"
                )
        return loss, norm

    def _save_before_failure(self) -> str:
        """Save the steps before one that is not finite, and say where. Weights that are not finite are not saved."""
        if not self.step:
            return "nothing is saved, because no step was done"
        with contextlib.suppress(TrainingError):  # the step's own error is the one to tell
            self._finish_save()
        if unsound := unsound_parameters(self.model, self.ranks.peers):
            reason = f"the weights are not finite ({len(unsound)}: {unsound[0]}, ...)"
            return f"nothing is saved, because {reason}; {self._newest_checkpoint()}"
        message = self._saved_or_why_not()
        if self.last_checkpoint != self.folder.store.folder_of(self.step):
            return message
        return (
            f"{message}\n  with the same settings, `--resume` makes this step again; to change the optimizer or the "
            f"data, start a new run from these weights: model.checkpoint={self.folder.path} and another output_dir"
        )

    def _saved_or_why_not(self, steps: str = "the steps before it") -> str:
        """Save the finished ``steps`` after a failure. An error of the disk must not hide that failure."""
        try:
            return f"{steps} are saved in {self._save()}"
        except LostRankError:  # it says itself why it failed
            raise
        except TrainingError as error:
            return f"{steps} could not be saved: {error}; {self._newest_checkpoint()}"

    def _newest_checkpoint(self) -> str:
        return f"the last checkpoint is {self.last_checkpoint}" if self.last_checkpoint else "no checkpoint exists"

    def _with_what_was_measured(self) -> Recipe:
        """Return the recipe with measured values in place of `auto`."""
        parallel = self.recipe.parallel
        if (chunks := self.experts.chunks.settled) is not None:
            parallel = parallel.with_expert_chunks(chunks)
        if (measured := self.encoder_costs.settled) is not None:
            parallel = parallel.with_quadratic_costs(measured.quadratic)
        return self.recipe.model_copy(update={"parallel": parallel})

    def train_step(self, batch: StepBatch) -> tuple[float, float]:
        """One optimizer step over ``batch`` and the batches of all other ranks.

        Returns:
            The total loss and the gradient norm before clipping, the same on all ranks.

        Raises:
            NonFiniteError: on all ranks, before the update: no weight changes. The message names the samples.
        """
        settings = self.recipe.train.optimizer
        packs: list[PackLosses] = []
        part = self._accumulate(batch, self.watch.at, lambda pack, output: packs.append(PackLosses.of(pack, output)))
        if self.compiled is not None:
            self.compiled.check()
        self.watch.at(phase="optimizer")
        self.spans.optimizer_begins()
        whole_norm = clip_gradients(self._parameters, settings.max_grad_norm)
        # The one time in a step that the host waits for the device.
        local_loss, norm = torch.stack([part.double(), whole_norm.to(part.device, torch.float64)]).tolist()
        loss = self.ranks.peers.sum(local_loss)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            mixed = mixed_precision(self.recipe.train, self.device.type) is True
            origin = self._origin_of_non_finite(batch)
            raise not_finite_error(self.step + 1, loss, norm, packs, origin, self.ranks.peers, self.recipe, mixed)
        if num_targets := sum(batch.plan.loss_counts.values()):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.recipe.train.steps, settings, group["peak"])
            self.optimizer.step()
            self.experts.routers.end()
        else:
            self.steps_without_targets += 1
        self.optimizer.zero_grad(set_to_none=True)
        for losses in packs:
            self.meter.add_losses(losses)
        if self.ranks.is_first_with_its_samples:
            self.meter.add_samples(batch.packs, self.model.media_of_data)
        self.mean_loss.add(loss, num_targets)
        self.samples += int(batch.plan.num_samples.sum())
        self.step += 1
        self.experts.routing.end(self.step)
        return loss, norm

    def _accumulate(self, batch: StepBatch, on_phase: OnPhase, on_output: OnOutput | None = None) -> torch.Tensor:
        # The same in a resumed run, and on tensor parallel and pipeline ranks.
        seed_device(mixed_seed(self.recipe.train.seed, self.step, self.ranks.loss_peers.rank), self.device)
        return accumulate_gradients(
            self.model,
            batch,
            loss_weights=self.recipe.train.loss_weights,
            on_output=on_output,
            on_phase=on_phase,
            forward_context=self.experts.routing.forward_context,
            routers=self.experts.routers,
            recorder=self.spans.recorder,
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

    def _metrics(self, norm: float) -> dict[str, Any]:
        settings = self.recipe.train.optimizer
        rate = partial(learning_rate, self.step - 1, self.recipe.train.steps, settings)
        own = {name: rate(peak) for name, peak in settings.learning_rates.items()}
        of_rank = (
            self.loader.num_rejected,
            (tuple(self.data_state.slots), self.loader.reasons),
            self.stopwatch.data_wait,
        )
        num_rejected, reasons, waits = zip(*self.ranks.peers.gather(of_rank), strict=True)
        rejected = rejected_by_source(num_rejected)
        return {
            "step": self.step,
            "samples": self.samples,
            "epoch": self.samples / max(1, sum(self.loader.order.lengths) - sum(rejected.values())),
            "seconds": time.perf_counter() - self._started,
            "loss": self.mean_loss.read(),
            "grad_norm": norm,
            "learning_rate": rate(settings.learning_rate),
            **({"learning_rates": own} if own else {}),
            **self.meter.read(self.ranks.meter_peers),
            **self.flops.read(self.ranks.peers, self.stopwatch.seconds),
            **self.stopwatch.read(self.recipe.train.micro_batches * self.recipe.data.pack_tokens),
            **memory_metrics(self.device, self.ranks.peers),
            "data_wait": max(waits),
            "rejected": rejected,
            "rejected_reasons": reasons_by_source(reasons),
            "steps_without_targets": self.steps_without_targets,
            "recompiles": self.compiled.recompiles if self.compiled else 0,
            **self.experts.metrics(),
            **self.encoder_metrics,
        }

    def _heldout_losses(self, interrupt: Interrupt) -> dict[str, Any] | None:
        """Held-out losses for the metrics of this step; None: they are not due, or Ctrl-C interrupted them."""
        if self.evaluator is None or not self.recipe.measures_heldout_loss(self.step):
            return None
        with self.watch.paused("evaluate"), self._eager():
            losses = partial(self.evaluator.losses, lambda _: self._stop_at(interrupt))
            found = self.ranks.of_first(self._unless_stopped(losses))
        self.stopwatch = Stopwatch()
        return found

    def _eager(self) -> contextlib.AbstractContextManager[None]:
        return self.compiled.paused() if self.compiled else contextlib.nullcontext()

    def _unless_stopped(self, work: Callable[[], T]) -> T | None:
        """Evaluate on the ranks that have the foundation; return None on those of sections, and after Ctrl-C."""

        def stoppable() -> T | None:
            with contextlib.suppress(StoppedError):
                return work()
            return None

        return serving(self.model, stoppable)

    def _stop_at(self, interrupt: Interrupt) -> None:
        if self.ranks.section_peers.any(interrupt.requested):
            raise StoppedError

    def _save_is_due(self) -> bool:
        """Whether to save after this step; the first rank decides for all. `auto` leaves space for the last save."""
        if not self.saver.is_writing:
            self.save_times.end()
        if not (self.ranks.is_first and self.save_times.is_due(self.step)):
            return False
        if self.recipe.train.save_every == "auto" and not self.folder.has_room(self.step):
            self.save_times.restart(self.step)
            return False
        return True

    def _save(self, *, waits: bool = True) -> Path:
        """Save the finished steps. Without ``waits`` the checkpoint may be written while training goes on."""
        target = self.folder.store.folder_of(self.step)
        self._finish_save()
        if self.last_checkpoint == target:
            return target
        with self.watch.paused("save"):
            self.save_times.begin(self.step)
            line = self._line if self._line.get("step") == self.step else None
            self.saver.save(self._state(), line, waits=waits)
        if self.last_checkpoint == target:  # nothing is left to be written
            self.save_times.end()
            self._tell("on_save", target)
        return target

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        with self.watch.paused("save"):
            written = self.saver.finish()
        if written is not None:
            self._tell("on_save", written)

    def _state(self) -> TrainingState:
        measured = self.encoder_costs.settled
        return TrainingState(
            self.step,
            time.perf_counter() - self._started,
            self.steps_without_targets,
            merge_states(self.ranks.peers.gather_on_first(self.data_state)),
            self.loader.order.lengths,
            self.experts.routers.expert_shares(),
            self.experts.chunks.settled,
            None if measured is None else dict(measured.quadratic),
            None if measured is None else dict(measured.seconds),
            self.encoder_costs.unused_until,
            self.meter.totals(self.ranks.meter_peers),
            self.mean_loss.mean,
            self.mean_loss.tokens,
            self.samples,
        )

    def _scores_on_the_way(
        self, interrupt: Interrupt, losses: dict[str, Any], metrics: MetricsFile | None
    ) -> dict[str, Any]:
        """Evaluate while the run goes on. Return the scores for the line of metrics; nothing after Ctrl-C."""
        with contextlib.suppress(StoppedError), self.watch.paused("evaluate"):
            self._scored = {self.step: self._evaluate(interrupt, losses, metrics)}
        self.model.train()
        self.stopwatch = Stopwatch()
        return {"scores": self._scored[self.step]} if self.step in self._scored else {}

    def _evaluate(
        self, interrupt: Interrupt, losses: dict[str, Any] | None, metrics: MetricsFile | None
    ) -> dict[str, float]:
        """``losses``: held-out losses of the last step, if they were due."""
        settings, evaluator = self.recipe.evaluation, self.evaluator
        if settings is None or evaluator is None:
            return {}
        with Activity(console, "evaluation") as activity, self._eager():

            def notify(doing: str) -> None:
                self._stop_at(interrupt)
                activity.update(doing)

            result = self._unless_stopped(partial(evaluator.evaluate, notify, losses))
        scores = self.ranks.of_first(None if result is None else result.scores)
        if scores is None:
            raise StoppedError
        scores |= {"seconds": time.perf_counter() - self._started}
        losses = self.ranks.of_first(None if result is None else result.losses)
        skipped = merge_states(self.ranks.peers.gather_on_first(self.data_state)).rejected

        def write() -> None:
            assert result is not None
            rejected = [*skipped, *result.rejected]
            shown = write_results(self.folder, self.step, result, scores, rejected, settings.saved_samples)
            if metrics is not None:
                metrics.show(self.step, shown)

        self.ranks.first(write)
        self._tell("on_evaluate", result or Evaluation(losses or {}, [], scores, []))
        return scores


@contextlib.contextmanager
def _settled_objects_uncollected() -> Iterator[None]:
    """Exclude the half million objects of imports and models from garbage collection during training.

    Where the process has frozen its imports already, nothing is done: they would be collected after ``gc.unfreeze``.
    """
    if all(found is not sys.modules for found in gc.get_objects()):  # gc.get_freeze_count takes 50 ms
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
