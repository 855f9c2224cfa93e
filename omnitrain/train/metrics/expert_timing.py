"""What experts and their exchanges did in the steps that somebody looks at: exposed communication, and traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts import LayerSpans, experts_in, set_experts
from omnitrain.ops.timing import Recorded, SpanRecorder
from omnitrain.peers import Peers
from omnitrain.recipe import Recipe
from omnitrain.train.metrics.chrome_trace import write_chrome_trace


@dataclass(frozen=True)
class Exposed:
    """Communication behind which nothing was computed, in one step; the mean over all ranks.

    Attributes:
        seconds: of all layers.
        share: of the step.
        layers: name of the experts -> seconds.
    """

    seconds: float
    share: float
    layers: dict[str, float]


class ExpertSpans:
    """Records the steps of which a line of metrics or a trace is written, and no others.

    Args:
        model: laid out, or on one process.
        device: of this rank.
        recipe: says which steps.
        folder: where traces go.

    Raises:
        UserError: traces are asked for, and the model has no experts.
    """

    def __init__(self, model: OmniModel, device: torch.device, recipe: Recipe, folder: Path) -> None:
        self._recipe, self._folder = recipe, folder
        self._recorder, self._last = SpanRecorder(device), Recorded(0.0, 0.0, ())
        layers = list(experts_in(model))
        if (traced := recipe.train.trace.steps) and not layers:
            raise UserError(
                f"train.trace.steps: found {traced}, but {type(model.foundation).__name__} has no experts "
                "whose work could be traced; remove it"
            )
        self._has_experts = bool(layers)
        for name, module in layers:
            set_experts(module, spans=LayerSpans(self._recorder, name))

    @contextmanager
    def step(self, number: int, rank: int) -> Iterator[None]:
        """Optimizer step ``number``, from 1, on ``rank``."""
        is_traced = number in self._recipe.train.trace.steps
        if not self._has_experts or not (is_traced or self._recipe.writes_metrics(number)):
            yield
            return
        self._recorder.begin()
        yield
        self._last = self._recorder.end()
        if is_traced:
            write_chrome_trace(self._last, self._folder / f"step-{number:08d}-rank-{rank}.json", rank)

    def exposed(self, peers: Peers) -> Exposed:
        """Of the last recorded step. Every rank calls it."""
        own: defaultdict[str, float] = defaultdict(float)
        for span in self._last.spans:
            if span.what.kind == "wait":
                own[span.what.layer] += span.seconds
        everywhere = peers.gather((dict(own), self._last.seconds))
        names = {name for waited, _ in everywhere for name in waited}
        layers = {n: sum(waited.get(n, 0.0) for waited, _ in everywhere) / peers.size for n in sorted(names)}
        seconds = sum(layers.values())
        step = sum(took for _, took in everywhere) / peers.size
        return Exposed(seconds, seconds / step if step else 0.0, layers)
