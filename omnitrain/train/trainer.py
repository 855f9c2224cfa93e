"""``Trainer(recipe).fit()``: one loop, one step on one screen."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint.whole import whole_optimizer_state, whole_weights
from omnitrain.data.loader import StepLoader, build_dataloader, first_samples, require_usable
from omnitrain.data.processor import OmniProcessor
from omnitrain.data.rows import RowSource, open_sources
from omnitrain.data.sample import Rejected, Sample
from omnitrain.data.slots import merge_states
from omnitrain.errors import TrainingError, UserError
from omnitrain.models.in_step import idle_prompt
from omnitrain.models.lora_files import save_adapters, split_weights
from omnitrain.models.omni import OmniModel
from omnitrain.models.table import component_rows
from omnitrain.ops.compile import CompiledBlocks, compile_blocks
from omnitrain.optim.adamw import build_optimizer, learning_rate
from omnitrain.optim.gradients import clip_gradients
from omnitrain.parallel.applied import AppliedLayout, layout_of
from omnitrain.parallel.expert_chunks import ExpertChunks
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.placing import StepBatch
from omnitrain.parallel.planning import step_planner
from omnitrain.parallel.recorded_routing import RoutingOfRun
from omnitrain.parallel.routers import Routers
from omnitrain.parallel.step import accumulate_gradients
from omnitrain.recipe import Recipe
from omnitrain.recipe.load import require_heads
from omnitrain.recipe.parallel import FOUNDATION, PlanError
from omnitrain.train.device import use_device
from omnitrain.train.display import (
    StepProgress,
    console,
    quiet_libraries,
    show_components,
    show_contract,
    show_kept_memory,
    show_layout,
    show_scores,
)
from omnitrain.train.evaluate import Evaluation, evaluate, load_scorer
from omnitrain.train.expert_spans import ExpertSpans
from omnitrain.train.folder import RunFolder
from omnitrain.train.interrupt import Interrupt, StoppedError
from omnitrain.train.memory import measure_kept_memory
from omnitrain.train.metrics import LossMeter, MetricsFile, Stopwatch, peak_memory_mb
from omnitrain.train.ranks import join_ranks
from omnitrain.train.resume import require_same_rows
from omnitrain.train.samples import save_samples
from omnitrain.train.setup import build_from_recipe, compute_dtype, load_checkpoint, use_ops
from omnitrain.train.state import TrainingState, read_state, trainable, write_state

_IDLE_STEPS = 10  # from the first on without a token to predict, which end a run


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
        recipe: as given, with what was measured in the place of `auto`.
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
        self.recipe = recipe
        self.device = use_device(recipe.train)
        self.ranks = join_ranks(recipe.parallel, self.device)
        self.folder = RunFolder(recipe)
        load_scorer(recipe.evaluation.scorer if recipe.evaluation else None)  # a mistake in it comes before the work
        self.resumed = self.last_checkpoint = self.folder.checkpoint_to_resume() if resume else None
        self.model, self.processor = self.ranks.one_by_one(self._build)
        self.ops = use_ops(self.model, recipe.model.ops, self.device, compute_dtype(recipe.parallel))
        compiled = self._compiled()
        self.layout = self._lay_out()
        self.compiled = compiled or (self.layout.components[FOUNDATION].compiled if self.layout is not None else None)
        self.routers = Routers(self.model, recipe.train.experts)
        experts = recipe.train.experts
        self.routing = RoutingOfRun(self.model, experts.record, experts.replay, self.ranks.peers.rank)
        self.spans = ExpertSpans(self.model, self.device, recipe.train, self.folder.path / "trace")
        offloaded = self.layout.offloaded(self.model) if self.layout is not None else ()
        self.optimizer = build_optimizer(self.model, recipe.train.optimizer, offloaded)
        state = read_state(self.resumed, self.model, self.optimizer) if self.resumed else TrainingState()
        self.step, self.steps_without_targets = state.step, state.steps_without_targets
        self.routers.continue_from(state.expert_shares)
        self.expert_chunks = ExpertChunks(self.model, state.expert_chunks)
        self.recipe = self.folder.recipe = self._with_what_was_measured()
        self.loader, self.heldout = self._open_data(state)
        self.data_state = self.loader.state()
        self.meter, self.stopwatch = LossMeter(), Stopwatch()
        self.watch = self.ranks.watch(recipe.train.stall_seconds)
        self._started = started - state.seconds

    def _build(self) -> tuple[OmniModel, OmniProcessor]:
        checkpoint, freeze = self.resumed, self.recipe.model.freeze
        model, processor = load_checkpoint(checkpoint, freeze) if checkpoint else build_from_recipe(self.recipe)
        require_heads(self.recipe, model.decoders)
        _ = model.runner  # checks the contract
        return model.train(), processor

    def _compiled(self) -> CompiledBlocks | None:
        settings = self.recipe.train.compile
        if not settings.enabled:
            return None
        return compile_blocks(self.model.foundation, max_recompiles=settings.max_recompiles)

    def _lay_out(self) -> AppliedLayout | None:
        """Put the model on the ranks as the plan says; a process alone without a plan just has it on its device."""
        if self.ranks.state is None:
            self.model.to(self.device)
            return None
        state, plan = self.ranks.state, self.recipe.parallel
        try:
            build_parallelize_model(self.model, parallel_state=state, parallel_plan=plan, enable_mixed_precision=None)
        except PlanError as error:
            raise error.under("parallel") from None
        return layout_of(self.model)

    def _open_data(self, state: TrainingState) -> tuple[StepLoader, list[RowSource]]:
        data = self.recipe.data
        loader = build_dataloader(
            data,
            self.processor,
            seed=self.recipe.train.seed,
            state=state.data,
            alone=not self.model.runner.contract.packs,
            without_tails=self.model.runner.contract.without_tails,
            slots=self.recipe.train.micro_batches,
            rank=self.ranks.data_rank,
            ranks=self.ranks.data_size,
            idle=idle_prompt(self.model),
            then=step_planner(self.model, self.ranks.meeting),
        )
        if self.resumed:
            require_same_rows(state.rows, loader.order.lengths, self.folder.path)
        heldout = open_sources(data.heldout)
        require_usable([*loader.sources, *heldout], self.processor)
        return loader, heldout

    def fit(self) -> RunSummary:
        """Train to the last step (or Ctrl-C), save, evaluate. With several ranks, all of them call it.

        Raises:
            NonFiniteError: a loss or gradient is not finite.
            UserError: data turned out to be unusable; the steps done are saved, unless they had nothing to predict.
            TrainingError: so they are where a data process was killed.
        """
        train = self.recipe.train
        self._show()
        self.stopwatch = Stopwatch()
        with (
            Interrupt() as interrupt,
            _settled_objects_uncollected(),
            StepProgress(train.steps, self.step) as progress,
            contextlib.closing(iter(self.loader)) as steps,
            self.watch,
        ):
            self.watch.follow(self.model)
            # Data of no use end the run before it writes anything.
            first = [self._next_batch(steps)] if self.step < train.steps else []
            metrics = self.ranks.first(self._open_folder)
            interrupted = False
            while self.step < train.steps and not interrupted:
                loss, norm = self._measured_step(first.pop() if first else self._next_batch(steps))
                self.data_state = self.loader.state()
                self._require_targets()
                progress.update(self.step)
                if self.step % train.log_every == 0 or self.step == train.steps:
                    line = self._metrics(loss, norm)
                    if metrics is not None:
                        metrics.write(line)
                    progress.update(self.step, _status(line))
                if train.save_every and self.step % train.save_every == 0 and self.step < train.steps:
                    self._save()
                interrupted = self.ranks.peers.any(interrupt.requested)
            checkpoint = self._save()
            if not interrupted:
                with contextlib.suppress(StoppedError), self.watch.paused("evaluate"):
                    return RunSummary(self.step, False, checkpoint, self._evaluate(interrupt))
        console.print(f"interrupted at step {self.step}; saved {checkpoint}; `omnitrain run ... --resume` continues")
        return RunSummary(self.step, True, checkpoint, {})

    def _open_folder(self) -> MetricsFile:
        self.folder.open(resumed=self.resumed is not None)
        return MetricsFile(self.folder.path / "metrics.jsonl", resume_step=self.step)

    def _show(self) -> None:
        show_components(component_rows(self.model, self.ops))
        show_contract(self.model.runner.contract, in_full=False)
        if self.layout is not None:
            show_layout(self.layout.table(self.model))
        if self.compiled is not None:
            console.print(f"compiled block by block: {len(self.compiled.names)} blocks of the foundation")
        if self.device.type == "cuda":
            self.show_memory()

    def show_memory(self) -> None:
        """Print what full packs keep for their backward; of one process without a plan that packs several samples."""
        if self.ranks.state is not None or self.compiled is not None or not self.model.runner.contract.packs:
            return
        pack_tokens = self.recipe.data.pack_tokens
        firsts = first_samples(self.loader.sources, self.processor).values()
        samples = [first for first in firsts if isinstance(first, Sample) and 2 * len(first) <= pack_tokens]
        if samples:
            memory = measure_kept_memory(self.model, samples)
            show_kept_memory(memory.of_full_packs(samples, pack_tokens), pack_tokens)

    def _next_batch(self, steps: Iterator[StepBatch]) -> StepBatch:
        """The packs of a step. Where the data fail, on any rank, the steps done are saved first."""
        self.watch.at(step=self.step + 1, phase="data")
        waiting = time.perf_counter()
        batch: StepBatch | None = None
        failure: Exception | None = None
        try:
            batch = next(steps)
        except (UserError, TrainingError) as error:
            failure = error
        if self.ranks.peers.any(batch is None):
            if self.step:
                console.print(f"the data failed at step {self.step + 1}; saved {self._save()}")
            raise failure or TrainingError(f"step {self.step + 1}: the data failed on another rank")
        assert batch is not None
        self.stopwatch.add(int(batch.plan.tokens.sum()), time.perf_counter() - waiting)
        return batch

    def _measured_step(self, batch: StepBatch) -> tuple[float, float]:
        peers, chunks = self.ranks.peers, self.expert_chunks.settled
        with (
            self.spans.step(self.step + 1, peers.rank),
            self.expert_chunks.measured(int(batch.plan.tokens.sum()), peers),
        ):
            loss, norm = self.train_step(batch)
        if self.expert_chunks.settled != chunks:
            self.recipe = self._with_what_was_measured()
            self.ranks.first(lambda: self.folder.save_recipe(self.recipe))
            console.print(f"expert_chunks: {self.expert_chunks.settled} was the fastest number, and stays")
        return loss, norm

    def _require_targets(self) -> None:
        """A step without a token to predict is counted. If that is all there ever was, it is a mistake in the data."""
        if self.steps_without_targets == self.step >= min(_IDLE_STEPS, self.recipe.train.steps):
            raise UserError(
                f"nothing was trained in the first {self.step} steps: no sample of them has a token to predict; what "
                "messages of the role `assistant` say is predicted (`omnitrain check` counts it in the first rows)"
            )

    def _with_what_was_measured(self) -> Recipe:
        """The recipe without `auto`, as far as that was measured."""
        if (chunks := self.expert_chunks.settled) is None:
            return self.recipe
        return self.recipe.model_copy(update={"parallel": self.recipe.parallel.with_expert_chunks(chunks)})

    def train_step(self, batch: StepBatch) -> tuple[float, float]:
        """One optimizer step over ``batch`` and the batches of all other ranks.

        Returns:
            The total loss and the gradient norm before clipping, the same on all ranks.

        Raises:
            NonFiniteError: before the update, on all ranks; the message names the samples.
        """
        settings = self.recipe.train.optimizer
        torch.manual_seed(_seed_of(self.recipe.train.seed, self.step, self.ranks.loss_peers.rank))
        part = accumulate_gradients(
            self.model,
            batch,
            loss_weights=self.recipe.train.loss_weights,
            observe=self.meter.add,
            note=self.watch.at,
            around=self.routing.around,
            routers=self.routers,
        )
        if self.compiled is not None:
            self.compiled.check()
        self.watch.at(phase="optimizer")
        norm = clip_gradients(self.model.parameters(), settings.max_grad_norm).item()
        loss = self.ranks.peers.sum(part.item())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            everywhere = self.ranks.peers.gather([pack.info.ids for pack in batch.packs])
            ids = list(dict.fromkeys(names for packs in everywhere for names in packs))
            raise NonFiniteError(f"step {self.step + 1}: loss {loss}, gradient norm {norm}; samples {ids}")
        if sum(batch.plan.loss_counts.values()):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.recipe.train.steps, settings)
            self.optimizer.step()
            self.routers.end()
        else:
            self.steps_without_targets += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.routing.end(self.step)
        return loss, norm

    def _metrics(self, loss: float, norm: float) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            **self.meter.read(self.ranks.loss_peers),
            **self.stopwatch.read(),
            "memory_mb": max(self.ranks.peers.gather(peak_memory_mb(self.device))),
            "rejected": len({row for rows in self.ranks.peers.gather(list(self.loader.rejected)) for row in rows}),
            "steps_without_targets": self.steps_without_targets,
            "recompiles": self.compiled.recompiles if self.compiled else 0,
            **self._experts(),
            **self._replayed(),
        }

    def _experts(self) -> dict[str, Any]:
        if not (layers := self.routers.read()):
            return {}
        exposed = self.spans.exposed(self.ranks.peers)
        return {
            "experts": {name: row | {"exposed": exposed.layers.get(name, 0.0)} for name, row in layers.items()},
            "exposed_communication": {"seconds": exposed.seconds, "share": exposed.share},
        }

    def _replayed(self) -> dict[str, dict[str, int]]:
        """Of all ranks, where decisions of an earlier run are taken."""
        if self.recipe.train.experts.replay is None:
            return {}
        near_ties, others = (round(self.ranks.loss_peers.sum(number)) for number in self.routing.read())
        return {"replay": {"near_ties": near_ties, "others": others}}

    def _save(self) -> Path:
        target = self.folder.store.folder_of(self.step)
        if self.last_checkpoint == target:
            return target
        with self.watch.paused("save"):
            weights = whole_weights(self.model, keep=self.ranks.is_first)
            optimizer = whole_optimizer_state(self.model, self.optimizer)
            data = merge_states(self.ranks.peers.gather(self.data_state))
            seconds, rows = time.perf_counter() - self._started, self.loader.order.lengths
            state = TrainingState(
                self.step,
                seconds,
                self.steps_without_targets,
                data,
                rows,
                self.routers.expert_shares(),
                self.expert_chunks.settled,
            )

            def write(folder: Path) -> None:
                base, adapters = split_weights(self.model, weights)
                self.model.save_pretrained(folder, state_dict=base)
                save_adapters(self.model, folder, adapters)
                self.processor.save_pretrained(folder)
                write_state(folder, state, trainable(self.model), optimizer)

            def save() -> None:
                self.folder.store.save(self.step, write)
                self.folder.list_rejected(data.rejected)

            self.ranks.first(save)
        self.last_checkpoint = target
        return target

    def _evaluate(self, interrupt: Interrupt) -> dict[str, float]:
        if self.recipe.evaluation is None:
            return {}
        eager = self.compiled.paused() if self.compiled else contextlib.nullcontext()
        with console.status("evaluation") as status, eager:

            def notify(doing: str) -> None:
                if self.ranks.peers.any(interrupt.requested):
                    raise StoppedError
                status.update(doing)

            peers = self.ranks.loss_peers
            result = evaluate(self.model, self.processor, self.heldout, self.recipe, notify, peers)
        scores = result.scores | {"seconds": time.perf_counter() - self._started}
        trained_on = merge_states(self.ranks.peers.gather(self.data_state)).rejected
        self.ranks.first(lambda: self._report(result, scores, [*trained_on, *result.rejected]))
        return scores

    def _report(self, result: Evaluation, scores: dict[str, float], skipped: Sequence[Rejected]) -> None:
        assert self.recipe.evaluation is not None
        written = self.folder.write_scores(scores | {"losses": result.losses})
        page = save_samples(result.answers, self.folder.path / "samples", self.recipe.evaluation.saved_samples)
        show_scores(scores, title=f"{len(result.answers)} held-out answers")
        listed = self.folder.list_rejected(skipped)
        console.print(f"scores: {written}\nsamples: {page}")
        if skipped:
            console.print(f"rows skipped: {len(skipped)}, listed in {listed}")


@contextlib.contextmanager
def _settled_objects_uncollected() -> Iterator[None]:
    """Imports and models are half a million objects; the garbage collector need not walk them during training."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _seed_of(seed: int, step: int, rank: int) -> int:
    """Of the random numbers of a step on a rank (dropout): a resumed run draws those of the uninterrupted one."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest(), "little")


def _status(line: dict[str, Any]) -> str:
    heads = "  ".join(f"{name} {head['loss']:.3f}" for name, head in line["heads"].items() if head["tokens"])
    return f"loss {line['loss']:.3f}  {heads}  {line['tokens_per_second']:,.0f} tokens/s"
