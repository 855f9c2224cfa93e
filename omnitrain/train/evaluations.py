"""The evaluations of a run: held-out losses and scores on its way, and at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from omnitrain.data.loading.slots import merge_states
from omnitrain.data.packing.sample import Rejected
from omnitrain.optim.ema import AveragedWeights
from omnitrain.recipe import Recipe
from omnitrain.train.evaluate.evaluate import EvaluationResult, Evaluator
from omnitrain.train.evaluate.media_files import save_samples
from omnitrain.train.interrupt import Interrupt, StoppedError
from omnitrain.train.measures import RunMeasures
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.display import show_scores
from omnitrain.train.metrics.meter import MetricsFile
from omnitrain.train.metrics.progress import Activity
from omnitrain.train.metrics.step_timing import Stopwatch
from omnitrain.train.run_state.run_folder import RunFolder


@dataclass
class Evaluations:
    """Evaluates a run where that is due, and stops at Ctrl-C. Every rank calls all methods."""

    evaluator: Evaluator | None  # None: the recipe has no evaluation
    recipe: Recipe
    folder: RunFolder
    ema: AveragedWeights | None  # the averages that are evaluated with ``evaluation.ema``; None: there are none
    measures: RunMeasures
    interrupt: Interrupt
    metrics: MetricsFile | None  # where scores go; None on all ranks but the first
    tell: Callable[..., None]  # called with ``"on_evaluate"`` and each result
    paused: Callable[[str], contextlib.AbstractContextManager[Any]]  # a context in which no progress is expected
    scores: dict[int, dict[str, float]]  # steps done -> the last scores, which a later ``fit`` knows, too
    _losses: dict[int, dict[str, Any] | None] = field(default_factory=dict)  # steps done -> the last held-out losses

    def on_the_way(self, line: dict[str, Any]) -> None:
        """Add to a line of metrics the held-out losses and the scores that are due after its step."""
        step = self.measures.step
        if self.evaluator is None or not self.recipe.measures_heldout_loss(step):
            return
        with self.paused("evaluate"), self._as_evaluated():
            found = None
            with contextlib.suppress(StoppedError):
                found = self.evaluator.losses(lambda _: self._stop_if_interrupted())
            self._losses = {step: found}
        self.measures.stopwatch = Stopwatch()
        if found is None:
            return
        line["heldout"] = found
        if not self.recipe.evaluates(step) or step >= self.recipe.train.steps:
            self.tell("on_evaluate", EvaluationResult(found, [], {}, []))
            return
        with contextlib.suppress(StoppedError), self.paused("evaluate"):
            line["scores"] = self._evaluate(self.evaluator)
            self.scores.clear()
            self.scores[step] = line["scores"]
        self.measures.model.train()
        self.measures.stopwatch = Stopwatch()

    def at_end(self) -> dict[str, float] | None:
        """Return the scores of the last step, none without an evaluation. None: Ctrl-C."""
        if self.evaluator is None:
            return {}
        step = self.measures.step
        with contextlib.suppress(StoppedError), self.paused("evaluate"):
            scores = self.scores.get(step) or self._evaluate(self.evaluator)
            if self.metrics is not None and scores:
                self.metrics.track(step, {"scores": scores})
            return scores
        return None

    def _evaluate(self, evaluator: Evaluator) -> dict[str, float]:
        with Activity(console, "evaluation") as activity, self._as_evaluated():

            def notify(doing: str) -> None:
                self._stop_if_interrupted()
                activity.update(doing)

            result = evaluator.evaluate(notify, self._losses.get(self.measures.step))
        scores = result.scores | {"seconds": self.measures.seconds}
        skipped = merge_states(self.measures.ranks.peers.gather_on_first(self.measures.data)).rejected
        self.measures.ranks.first(partial(self._write, result, scores, skipped))
        self.tell("on_evaluate", result)
        return scores

    def _write(self, result: EvaluationResult, scores: dict[str, float], skipped: Sequence[Rejected]) -> None:
        assert self.recipe.evaluation is not None
        step, rejected = self.measures.step, [*skipped, *result.rejected]
        written = self.folder.write_scores({"step": step} | scores | {"losses": result.losses})
        per_source = self.recipe.evaluation.saved_samples
        page, shown = save_samples(result.answers, self.folder.path / "samples", per_source, step)
        show_scores(scores, title=f"{len(result.answers)} held-out answers")
        listed = self.folder.list_rejected(rejected)
        console.print(f"scores: {written}\nsamples: {page}")
        if rejected:
            console.print(f"rows skipped: {len(rejected)}, listed in {listed}")
        if self.metrics is not None:
            self.metrics.show(step, shown)

    @contextlib.contextmanager
    def _as_evaluated(self) -> Iterator[None]:
        """The model runs eagerly in this context, and with the averages of its weights where the recipe says so."""
        with contextlib.ExitStack() as stack:
            if self.measures.compiled:
                stack.enter_context(self.measures.compiled.paused())
            if self.ema is not None and self.recipe.evaluation is not None and self.recipe.evaluation.ema:
                stack.enter_context(self.ema.in_place_of_weights())
            yield

    def _stop_if_interrupted(self) -> None:
        if self.measures.ranks.peers.any(self.interrupt.requested):
            raise StoppedError
