"""Counts and measurements of a run, for its lines of metrics, its checkpoints and its plans."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnitrain.data.loading.loader import StepLoader
from omnitrain.data.loading.slots import merge_states, reasons_by_source, rejected_by_source
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.timing import Recorded, Span
from omnitrain.optim.adamw import learning_rate
from omnitrain.parallel.expert.chunk_tuning import ExpertChunks
from omnitrain.parallel.expert.load_balance import RouterMonitor
from omnitrain.parallel.expert.routing_record import RoutingOfRun
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.step.item_costs import (
    MEASURED_STEPS,
    UNUSED_STEPS,
    WARM_UP,
    Measured,
    MeasuredCosts,
    encoded_in,
    measured_components,
    publish,
)
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.parallel.step.order import deals_packs, encoders_of_own_packs
from omnitrain.plan.item_cost import Encoded, fitted_quadratic
from omnitrain.plan.schedule.actions import Action, Kind
from omnitrain.plan.step import StepPlan
from omnitrain.recipe import Recipe
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.train.device import compute_dtype, mixed_precision
from omnitrain.train.metrics.flops import run_flops
from omnitrain.train.metrics.meter import LossMeter, MeanLoss, PackLosses, memory_metrics
from omnitrain.train.metrics.step_timing import StepSpans, Stopwatch, encoder_metrics
from omnitrain.train.prepare import PreparedModel
from omnitrain.train.process_groups import Ranks
from omnitrain.train.run_state.save import TrainingState


class EncoderCosts:
    """Fits the quadratic part of the cost of components with ``quadratic_cost: measured``.

    With sections, it also measures how long their encoders and the first stage take, from which steps are ordered; and
    where packs are dealt by cost, how long the foundation and the encoders of a rank's own packs take. If ``state`` has
    what an earlier part of the run measured, nothing is measured again. ``settled``: what was measured; None: nothing,
    or not yet. ``unused_until``: the last step that is planned without it.
    """

    def __init__(self, model: OmniModel, ranks: Ranks, state: TrainingState) -> None:
        layout, self._ranks, self._rank, self._waits = layout_of(model), ranks, ranks.peers.rank, False
        self._components, self._apart, self._inside = list[str](), list[str](), list[str]()
        if layout is not None and ranks.peers.size > 1:
            self._components = list(measured_components(model))
            self._apart = [name for section in layout.sections.values() for name in section.components]
            self._inside = list(encoders_of_own_packs(model)) if deals_packs(model) else []
            self._waits = layout.states[FOUNDATION].size("fsdp") > 1
        quadratic, seconds = state.quadratic_costs or {}, state.section_seconds or {}
        is_known = quadratic.keys() >= set(self._components) and seconds.keys() >= set(self._timed)
        self.settled = Measured(quadratic, seconds) if is_known and self._names else None
        self._done_before = state.step
        self.unused_until = state.step + UNUSED_STEPS if self.settled is None else state.measured_costs_unused_until
        self._of_planner: MeasuredCosts | None = None
        self._encoded: defaultdict[str, list[Encoded]] = defaultdict(list)

    @property
    def _timed(self) -> list[str]:
        """The components of sections, or of a rank's own packs, and the foundation if there are any."""
        encoders = [*self._apart, *self._inside]
        return [*encoders, FOUNDATION] if encoders else []

    @property
    def _names(self) -> list[str]:
        """All components of which something is measured."""
        return list(dict.fromkeys([*self._components, *self._timed]))

    def of_planner(self) -> MeasuredCosts | None:
        """Return what the planner of this rank needs; None: nothing is measured."""
        if self._names:
            at = self._ranks.rendezvous
            self._of_planner = MeasuredCosts(self._done_before, self.unused_until, self.settled, at)
        return self._of_planner

    def restart(self, step: int) -> None:
        """Say that ``step`` steps are done when the data processes start to plan, again after Ctrl-C."""
        if self._of_planner is not None:
            self._of_planner.step, self._of_planner.settled = step, self.settled

    def measures(self, step: int) -> bool:
        """Whether step number ``step`` (from 1) is measured."""
        return bool(self._names) and self.settled is None and step <= self._done_before + MEASURED_STEPS

    def add(self, step: int, plan: StepPlan, recorded: Recorded) -> None:
        """Add a measured step; after the last one all ranks agree on what was measured. All ranks call this."""
        for name in self._names if step > self._done_before + WARM_UP else ():
            if name == FOUNDATION:
                row = self._of_first_stage(plan, recorded)
            else:
                seconds = seconds_of_forwards(recorded, name, has_actions=name in self._apart)
                row = encoded_in(plan, self._rank, name, seconds)
            self._encoded[name].append(row)
        if step == self._done_before + MEASURED_STEPS:
            of_ranks = self._ranks.peers.gather(dict(self._encoded))
            rows = {name: [row for of_rank in of_ranks for row in of_rank.get(name, [])] for name in self._names}
            quadratic = {name: fitted_quadratic(rows[name]) for name in self._components}
            self.settled = Measured(
                quadratic, {n: _seconds_per_unit(rows[n], quadratic.get(n, 0.0)) for n in self._timed}
            )
            publish(self._ranks.rendezvous, self.settled)

    def _of_first_stage(self, plan: StepPlan, recorded: Recorded) -> Encoded:
        """Samples and seconds of this rank's first stage; if ranks wait for each other, the longest samples count."""
        if self._rank not in plan.topology.readers or plan.topology.first_stage[self._rank] != self._rank:
            return Encoded(0, 0, 0, 0)
        spans = [span for span in recorded.spans if span.what.kind == "action" and Action.parse(span.what.name).passes]
        owners = plan.topology.owners if self._waits else [plan.topology.owner_of(self._rank)]
        longest = plan.squares[:, owners].argmax(axis=1)[:, None]
        tokens, squares = (
            float(np.take_along_axis(found[:, owners], longest, axis=1).sum()) for found in (plan.tokens, plan.squares)
        )
        return Encoded(len(spans), tokens, squares, foundation_seconds(spans, recorded, self._inside))


def foundation_seconds(spans: Sequence[Span], recorded: Recorded, inside: Sequence[str]) -> float:
    """Return the seconds of the foundation's forwards and backwards in a step of a rank.

    The forwards of the encoders ``inside`` do not count. Nothing says how long their backwards take. So a backward of
    the foundation is then taken to be twice as long as its forward; and if forwards and backwards overlap, a
    backward of an encoder is taken to be twice as long as its forward.
    """
    encoding = sum(seconds_of_forwards(recorded, name, has_actions=False) for name in inside)
    if not encoding or any(Action.parse(span.what.name).parts for span in spans):
        return max(0.0, sum(span.seconds for span in spans) - 3 * encoding)
    return 3 * (sum(span.seconds for span in spans if Action.parse(span.what.name).kind is Kind.F) - encoding)


def seconds_of_forwards(recorded: Recorded, component: str, *, has_actions: bool) -> float:
    """Return seconds of encoding each item once; of actions, ``ENCODE`` alone: backwards may repeat it."""
    if has_actions:
        actions = [(Action.parse(s.what.name), s.seconds) for s in recorded.spans if s.what.kind == "action"]
        return sum(seconds for a, seconds in actions if (a.kind, a.component) == (Kind.ENCODE, component))
    return sum(span.seconds for span in recorded.spans if (span.what.name, span.what.layer) == ("encode", component))


def _seconds_per_unit(rows: list[Encoded], quadratic: float) -> float:
    """Seconds per token, or per unit of the cost of items; 0 if nothing was computed."""
    units = sum(row.elements + quadratic * row.squares for row in rows)
    return sum(row.seconds for row in rows if row.elements) / units if units else 0.0


class RunMeasures:
    """Counts, sums, times and costs of a run, on from those that a checkpoint has. Every rank calls all methods."""

    def __init__(
        self,
        recipe: Recipe,
        prepared: PreparedModel,
        ranks: Ranks,
        device: torch.device,
        folder: Path,
        saved: TrainingState,
        started: float,
    ) -> None:
        self.model, self.compiled, self.ranks = prepared.model, prepared.compiled, ranks
        self._recipe, self._device, self._started = recipe, device, started - saved.seconds
        self.step, self.samples, self.steps_without_targets = saved.step, saved.samples, saved.steps_without_targets
        self.line: dict[str, Any] = {}  # the last one of metrics
        self.meter, self.mean_loss = LossMeter(), MeanLoss(saved.mean_loss, saved.loss_tokens)
        if ranks.meter_peers.rank == 0:
            self.meter.continue_from(saved.losses)
        self.stopwatch = Stopwatch()
        dtype = compute_dtype(recipe.parallel, mixed_precision(recipe.train, device.type))
        self.flops = run_flops(prepared.flops, prepared.layout, device, dtype)
        self.spans = StepSpans(prepared.model, device, recipe, folder / "trace")
        settings = recipe.train.experts
        self.routers = RouterMonitor(prepared.model, settings)
        self.routers.continue_from(saved.expert_shares)
        self.routing = RoutingOfRun(prepared.model, settings.record, settings.replay, ranks.peers.rank)
        self.chunks = ExpertChunks(prepared.model, saved.expert_chunks)
        self.encoder_costs = EncoderCosts(prepared.model, ranks, saved)
        self.encoder_metrics: dict[str, Any] = {}

    def follow(self, loader: StepLoader) -> None:
        """Take the training data, whose state follows the steps done."""
        self.loader, self.data = loader, loader.state()

    @property
    def seconds(self) -> float:
        """Training time so far, over all starts."""
        return time.perf_counter() - self._started

    @contextmanager
    def measured(self, batch: StepBatch) -> Iterator[None]:
        """Measure the step that runs within this context."""
        is_measured = self.encoder_costs.measures(self.step + 1)
        with (
            self.spans.step(self.step + 1, self.ranks.peers.rank, is_measured=is_measured),
            self.chunks.measured(int(batch.plan.tokens.sum()), self.ranks.peers),
        ):
            yield
        self.flops.add(batch)
        if self._recipe.writes_metrics(self.step):
            times = self.spans.of_encoders(self.ranks.peers)
            self.encoder_metrics = encoder_metrics(self.model, batch.plan, times)
        if is_measured:
            self.encoder_costs.add(self.step, batch.plan, self.spans.last)

    def add(self, batch: StepBatch, loss: float, packs: Sequence[PackLosses]) -> None:
        """Add a step whose update is made."""
        for losses in packs:
            self.meter.add_losses(losses)
        if self.ranks.is_first_with_its_samples:
            self.meter.add_samples(batch.packs, self.model.media_of_data)
        num_targets = sum(batch.plan.loss_counts.values())
        self.steps_without_targets += num_targets == 0
        self.mean_loss.add(loss, num_targets)
        self.samples += int(batch.plan.num_samples.sum())
        self.step += 1
        self.routing.end(self.step)

    def settled_in(self, recipe: Recipe) -> Recipe:
        """Return a recipe with the values that are measured so far in place of `auto` and `measured`."""
        parallel = recipe.parallel
        if (chunks := self.chunks.settled) is not None:
            parallel = parallel.with_expert_chunks(chunks)
        if (costs := self.encoder_costs.settled) is not None:
            parallel = parallel.with_numbers("quadratic_cost", "measured", costs.quadratic)
        return recipe.model_copy(update={"parallel": parallel})

    @property
    def settled(self) -> list[str]:
        """Lines that say which of these values are measured so far."""
        chunks, costs = self.chunks.settled or {}, self.encoder_costs.settled or Measured()
        first = self.encoder_costs.unused_until + 1
        return [
            *(
                f"experts.chunks of {name}: {number} was the fastest number, and stays"
                for name, number in chunks.items()
            ),
            *(
                f"quadratic_cost of {name}: {cost:.3g} was measured; it counts from step {first} on"
                for name, cost in costs.quadratic.items()
            ),
        ]

    def metrics(self, norm: float) -> dict[str, Any]:
        """Return the line of metrics of the last step, whose gradient norm was ``norm``."""
        train = self._recipe.train
        rate = partial(learning_rate, self.step - 1, train.steps, train.optimizer)
        own = {name: rate(peak) for name, peak in train.optimizer.learning_rates.items()}
        loader = self.loader
        of_rank = loader.num_rejected, (tuple(self.data.slots), loader.reasons), self.stopwatch.data_wait
        num_rejected, reasons, waits = zip(*self.ranks.peers.gather(of_rank), strict=True)
        rejected = rejected_by_source(num_rejected)
        return {
            "step": self.step,
            "samples": self.samples,
            "epoch": self.samples / max(1, sum(loader.order.lengths) - sum(rejected.values())),
            "seconds": self.seconds,
            "loss": self.mean_loss.read(),
            "grad_norm": norm,
            "learning_rate": rate(train.optimizer.learning_rate),
            **({"learning_rates": own} if own else {}),
            **self.meter.read(self.ranks.meter_peers),
            **self.flops.read(self.ranks.peers, self.stopwatch.seconds),
            **self.stopwatch.read(train.packs_per_step * self._recipe.data.pack_tokens),
            **memory_metrics(self._device, self.ranks.peers),
            "data_wait": max(waits),
            "rejected": rejected,
            "rejected_reasons": reasons_by_source(reasons),
            "steps_without_targets": self.steps_without_targets,
            "recompiles": self.compiled.recompiles if self.compiled else 0,
            **self._of_experts(),
            **self.encoder_metrics,
        }

    def _of_experts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if layers := self.routers.read():
            exposed = self.spans.exposed(self.ranks.peers)
            found["experts"] = {name: row | {"exposed": exposed.layers.get(name, 0.0)} for name, row in layers.items()}
            found["exposed_communication"] = {"seconds": exposed.seconds, "share": exposed.share}
        if self._recipe.train.experts.replay is not None:  # how the routers would have decided
            near_ties, others = (round(self.ranks.meter_peers.sum(count)) for count in self.routing.read())
            found["replay"] = {"near_ties": near_ties, "others": others}
        return found

    def to_save(self) -> TrainingState:
        """Return the state for a checkpoint."""
        costs = self.encoder_costs.settled
        return TrainingState(
            step=self.step,
            seconds=self.seconds,
            steps_without_targets=self.steps_without_targets,
            data=merge_states(self.ranks.peers.gather_on_first(self.data)),
            rows=self.loader.order.lengths,
            expert_shares=self.routers.expert_shares(),
            expert_chunks=self.chunks.settled,
            quadratic_costs=None if costs is None else dict(costs.quadratic),
            section_seconds=None if costs is None else dict(costs.seconds),
            measured_costs_unused_until=self.encoder_costs.unused_until,
            losses=self.meter.totals(self.ranks.meter_peers),
            mean_loss=self.mean_loss.mean,
            loss_tokens=self.mean_loss.tokens,
            samples=self.samples,
        )
