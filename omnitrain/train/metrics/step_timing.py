"""Time the actions of a step, its experts and their exchanges: exposed communication, and traces."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.install import set_experts
from omnitrain.ops.experts.timing import LayerSpans
from omnitrain.ops.experts.weights import experts_in
from omnitrain.ops.timing import FEATURES, Mark, Recorded, Span, SpanRecorder, What
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.step.windows import bytes_per_feature
from omnitrain.peers import Peers
from omnitrain.plan.schedule.actions import Action, Kind
from omnitrain.plan.step import StepPlan
from omnitrain.recipe import Recipe
from omnitrain.recipe.parallel import MAIN


@dataclass(frozen=True)
class Exposed:
    """Seconds of a step's communication without compute, mean over ranks: of all layers, its ``share``, by layer."""

    seconds: float
    share: float
    layers: dict[str, float]


@dataclass(frozen=True)
class EncoderTimes:
    """How long a step waited for an encoder, and how long the ranks of its section worked: means over ranks."""

    waited: float  # seconds for which a rank waited for features, of the ranks that need any
    # seconds of a rank in the actions of its schedule that encode or run the backward, waits for other ranks of its
    # section among them. 0 if no schedule has such actions
    busy: float
    busy_share: float  # the same as a share of the step

    @classmethod
    def of(cls, rows: Sequence[tuple[float | None, float | None, float]]) -> EncoderTimes:
        """Take the means over ranks; of each: seconds waited, seconds busy (None: not this rank), and of the step."""
        waited = [seconds for seconds, _, _ in rows if seconds is not None]
        busy = [(seconds, step) for _, seconds, step in rows if seconds is not None]
        shares = [seconds / step for seconds, step in busy if step]
        return cls(_mean(waited), _mean([seconds for seconds, _ in busy]), _mean(shares))


class StepSpans:
    """Records steps that are traced and, if ranks exchange anything, steps for which a line of metrics is written.

    ``data_waited``: seconds for which this rank waited for the packs of the next step to record.
    """

    def __init__(self, model: OmniModel, device: torch.device, recipe: Recipe, folder: Path) -> None:
        self._recipe, self._folder = recipe, folder
        self.recorder, self.last = SpanRecorder(device), Recorded(0.0, 0.0, ())
        self.data_waited = 0.0
        self._optimizer_began: Mark = None
        model.encode_recorder = self.recorder
        layers = list(experts_in(model))
        layout = layout_of(model)
        self._section = layout.state.section if layout is not None and layout.sections else None
        has_exchanges = layout is not None and layout.state.num_ranks > 1 and bool(model.media_names)
        self._is_in_metrics = bool(layers) or has_exchanges
        for name, module in layers:
            set_experts(module, spans=LayerSpans(self.recorder, name))

    @contextmanager
    def step(self, number: int, rank: int, *, is_measured: bool = False) -> Iterator[None]:
        """Record step ``number`` (from 1) on ``rank``, if its metrics or trace are written, or it ``is_measured``."""
        is_traced = number in self._recipe.train.trace.steps
        if not (is_traced or is_measured or (self._is_in_metrics and self._recipe.writes_metrics(number))):
            yield
            return
        self._optimizer_began = None
        self.recorder.begin()
        yield
        if self._optimizer_began is not None:
            self.recorder.add(What("compute", "optimizer"), self._optimizer_began, self.recorder.mark())
        self.last = self.recorder.end()
        if is_traced:
            file = self._folder / f"step-{number:08d}-rank-{rank}.json"
            waited = Span(What("wait", "data"), -self.data_waited, 0.0)  # before the recording
            write_chrome_trace(replace(self.last, spans=(waited, *self.last.spans)), file, rank, self._section)

    def optimizer_begins(self) -> None:
        """Mark where the gradient norm and the update begin, which last to the end of the step."""
        if self.recorder.is_on:
            self._optimizer_began = self.recorder.mark()

    def of_encoders(self, peers: Peers) -> dict[str, EncoderTimes]:
        """Return component -> the times of an encoder in the last recorded step. Every rank calls this."""
        of_ranks = peers.gather((_waits_and_work(self.last), self.last.seconds))
        found: defaultdict[str, list[tuple[float | None, float | None, float]]] = defaultdict(list)
        for of_rank, step in of_ranks:
            for name, (waited, busy) in of_rank.items():
                found[name].append((waited, busy, step))
        return {name: EncoderTimes.of(rows) for name, rows in sorted(found.items())}

    def exposed(self, peers: Peers) -> Exposed:
        """Return the exposed communication of the last recorded step. Every rank calls this."""
        waits: defaultdict[str, float] = defaultdict(float)
        for span in self.last.spans:
            if span.what.kind == "wait" and span.what.layer is not None and span.what.name != FEATURES:
                waits[span.what.layer] += span.seconds
        of_ranks = peers.gather((dict(waits), self.last.seconds))
        names = {name for of_rank, _ in of_ranks for name in of_rank}
        layers = {n: sum(of_rank.get(n, 0.0) for of_rank, _ in of_ranks) / peers.size for n in sorted(names)}
        seconds = sum(layers.values())
        step = sum(step_seconds for _, step_seconds in of_ranks) / peers.size
        return Exposed(seconds, seconds / step if step else 0.0, layers)


def _waits_and_work(recorded: Recorded) -> dict[str, tuple[float | None, float | None]]:
    """Component -> the seconds for which this rank waited for its features, and those in which it encoded."""
    waits: defaultdict[str, float] = defaultdict(float)
    work: defaultdict[str, float] = defaultdict(float)
    for span in recorded.spans:
        if span.what.kind == "action":
            action = Action.parse(span.what.name)
            if action.kind is Kind.RECV_F and action.stage is None:
                waits[action.owner] += span.seconds
            elif action.kind in (Kind.ENCODE, Kind.HEAD, Kind.ENCODE_B):
                work[action.component] += span.seconds
        elif span.what.name == FEATURES and span.what.layer is not None:
            waits[span.what.layer] += span.seconds
    return {name: (waits.get(name), work.get(name)) for name in {*waits, *work}}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# Tracks: actions of the schedule; compute and waiting of layers, within them; and one for each chunk's exchanges, which
# overlap others.
_ACTIONS, _COMPUTE, _FIRST_LINK = range(3)
_TITLES = {_ACTIONS: "actions", _COMPUTE: "compute"}


def write_chrome_trace(recorded: Recorded, file: Path, rank: int, section: str | None = None) -> None:
    """Write the spans of a step on one rank; a viewer loads the files of several ranks together, as processes."""
    of_section = "" if section is None else f" ({section})"
    names = [_named("process_name", rank, _COMPUTE, f"rank {rank}{of_section}")]
    names += [
        _named("thread_name", rank, track, _TITLES.get(track) or f"link, chunk {track - _FIRST_LINK}")
        for track in sorted({_track(span.what) for span in recorded.spans})
    ]
    events = [*names, *(_event(span, recorded.began, rank) for span in recorded.spans)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _track(what: What) -> int:
    if what.kind == "action":
        return _ACTIONS
    return _COMPUTE if what.kind != "link" or what.chunk is None else what.chunk + _FIRST_LINK


def _named(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": name}}


def _event(span: Span, began: float, rank: int) -> dict[str, Any]:
    what = span.what
    words = ("wait for" if what.kind == "wait" else "", what.name, "" if what.chunk is None else str(what.chunk))
    return {
        "ph": "X",
        "name": " ".join(filter(None, words)),
        "cat": ",".join(filter(None, (what.kind, what.phase))),
        "ts": 1e6 * (began + span.start),
        "dur": 1e6 * span.seconds,
        "pid": rank,
        "tid": _track(what),
        "args": {"layer": what.layer, "phase": what.phase, "chunk": what.chunk},
    }


_LISTED_RANKS = 16  # with more, a line of metrics has no list of them


def cost_metrics(costs: np.ndarray) -> dict[str, Any]:
    """Return least, mean and largest of the costs of ranks, ``[ranks]`` int64; and ``by_rank`` if there are few."""
    found: dict[str, Any] = {"min": int(costs.min()), "mean": float(costs.mean()), "max": int(costs.max())}
    return found | ({"by_rank": costs.tolist()} if len(costs) <= _LISTED_RANKS else {})


def encoder_metrics(model: OmniModel, plan: StepPlan, times: Mapping[str, EncoderTimes]) -> dict[str, Any]:
    """Return ``encoders``: encoder -> how its work is divided among ranks; nothing on one rank, or without media."""
    layout = layout_of(model)
    if layout is None or plan.topology.world_size == 1:
        return {}
    rows = {}
    for name in model.media_names:
        if (balance := plan.balance(name)) is not None:
            moved = plan.features_moved(name) * bytes_per_feature(model, name, layout.components[name].plan)
            taken = times.get(name, EncoderTimes(0.0, 0.0, 0.0))
            cost = cost_metrics(plan.loads(name).sum(axis=0))
            rows[name] = {**balance._asdict(), "cost": cost, "bytes_moved": moved, "waited": taken.waited}
            if layout.states[name].section != MAIN:
                rows[name] |= {"busy": taken.busy, "busy_share": taken.busy_share}
    return {"encoders": rows} if rows else {}


class Stopwatch:
    """Seconds, tokens, samples and media since the last reading, and the time spent waiting for data."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._reset()

    def _reset(self) -> None:
        self._waited, self._tokens, self._samples = 0.0, 0, 0
        self._media: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])  # name -> items, tokens
        self._steps, self._most_tokens, self._mean_tokens = 0, 0.0, 0.0

    def add(self, plan: StepPlan, waited: float) -> None:
        """Count what a step has, and the seconds it waited for its packs."""
        self._steps += 1
        self._waited += waited
        self._tokens += int(plan.tokens.sum())
        self._samples += int(plan.num_samples.sum())
        media = plan.topology.media
        medium = plan.slot % max(1, len(media))
        for index, name in enumerate(media):
            of_name = plan.item_tokens[medium == index]
            self._media[name][0] += len(of_name)
            self._media[name][1] += int(of_name.sum())
        by_rank = plan.tokens[:, plan.topology.owners]
        self._most_tokens += float(np.max(by_rank, axis=1, initial=0).sum())
        self._mean_tokens += float(by_rank.sum()) / by_rank.shape[1]

    @property
    def seconds(self) -> float:
        """Time since the last reading."""
        return max(time.perf_counter() - self._start, 1e-9)

    @property
    def data_wait(self) -> float:
        """Share of this time that this rank spent waiting for its packs."""
        return self._waited / self.seconds

    def read(self, room: int) -> dict[str, Any]:
        """Return the speed of all ranks, fill and imbalance; and reset.

        ``fill`` is the share of the packs' room that has tokens: packs have no padding, so the rest is not computed.
        ``imbalance`` is the tokens of the rank that has most, micro-batch by micro-batch, divided by the mean.
        ``room``: the most tokens of a step, over all ranks.
        """
        seconds = self.seconds
        reading: dict[str, Any] = {
            "tokens_per_second": self._tokens / seconds,
            "samples_per_second": self._samples / seconds,
            "fill": self._tokens / max(1, self._steps * room),
            "imbalance": self._most_tokens / self._mean_tokens if self._mean_tokens else 1.0,
        }
        if self._media:
            reading["media"] = {
                name: {"items_per_second": items / seconds, "tokens_per_second": tokens / seconds}
                for name, (items, tokens) in sorted(self._media.items())
            }
        self._start += seconds
        self._reset()
        return reading
