"""Time the actions of a step, its experts and their exchanges: exposed communication, and traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from omnitrain.models.omni.encode import FEATURES
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts import LayerSpans, experts_in, set_experts
from omnitrain.ops.timing import Recorded, SpanRecorder
from omnitrain.parallel.layout import layout_of
from omnitrain.peers import Peers
from omnitrain.recipe import Recipe
from omnitrain.train.metrics.chrome_trace import write_chrome_trace


@dataclass(frozen=True)
class Exposed:
    """Communication time in one step that no compute overlapped, as the mean over all ranks.

    Attributes:
        seconds: time of all layers in seconds.
        share: share of the step's time.
        layers: name of a layer's experts -> seconds.
    """

    seconds: float
    share: float
    layers: dict[str, float]


class StepSpans:
    """Records steps that are traced and, if ranks exchange anything, steps for which a line of metrics is written.

    Args:
        model: the model, sharded or in one process.
        device: device of this rank.
        recipe: recipe with the steps to record.
        folder: folder for traces.

    Attributes:
        recorder: is on during these steps.
    """

    def __init__(self, model: OmniModel, device: torch.device, recipe: Recipe, folder: Path) -> None:
        self._recipe, self._folder = recipe, folder
        self.recorder, self._last = SpanRecorder(device), Recorded(0.0, 0.0, ())
        model.encode_recorder = self.recorder
        layers = list(experts_in(model))
        layout = layout_of(model)
        has_exchanges = layout is not None and layout.state.world_size > 1 and bool(model.media_names)
        self._is_in_metrics = bool(layers) or has_exchanges
        for name, module in layers:
            set_experts(module, spans=LayerSpans(self.recorder, name))

    @contextmanager
    def step(self, number: int, rank: int, *, is_measured: bool = False) -> Iterator[None]:
        """Record optimizer step ``number`` (from 1) on ``rank``, if its metrics or trace are written.

        Args:
            number: number of the step.
            rank: this rank.
            is_measured: record it in any case.
        """
        is_traced = number in self._recipe.train.trace.steps
        if not (is_traced or is_measured or (self._is_in_metrics and self._recipe.writes_metrics(number))):
            yield
            return
        self.recorder.begin()
        yield
        self._last = self.recorder.end()
        if is_traced:
            write_chrome_trace(self._last, self._folder / f"step-{number:08d}-rank-{rank}.json", rank)

    @property
    def last(self) -> Recorded:
        """The last recorded step."""
        return self._last

    def waited(self, peers: Peers) -> dict[str, float]:
        """Return component -> seconds of the last recorded step in which a rank waited for features or their gradients.

        They are means over the ranks. Every rank calls this.
        """
        spans = [span for span in self._last.spans if span.what.name == FEATURES]
        own = {name: sum(s.seconds for s in spans if s.what.layer == name) for name in {s.what.layer for s in spans}}
        of_ranks = peers.gather(own)
        names = sorted({name for of_rank in of_ranks for name in of_rank if name is not None})
        return {name: sum(of_rank.get(name, 0.0) for of_rank in of_ranks) / peers.size for name in names}

    def exposed(self, peers: Peers) -> Exposed:
        """Return the exposed communication of the last recorded step. Every rank calls this."""
        waits: defaultdict[str, float] = defaultdict(float)
        for span in self._last.spans:
            if span.what.kind == "wait" and span.what.layer is not None and span.what.name != FEATURES:
                waits[span.what.layer] += span.seconds
        of_ranks = peers.gather((dict(waits), self._last.seconds))
        names = {name for of_rank, _ in of_ranks for name in of_rank}
        layers = {n: sum(of_rank.get(n, 0.0) for of_rank, _ in of_ranks) / peers.size for n in sorted(names)}
        seconds = sum(layers.values())
        step = sum(step_seconds for _, step_seconds in of_ranks) / peers.size
        return Exposed(seconds, seconds / step if step else 0.0, layers)
