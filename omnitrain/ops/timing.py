"""Record time spans in a step, by the host's clock or by device events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["action", "compute", "link", "wait"]
Phase = Literal["forward", "recompute", "backward"]
FEATURES = "features"  # name of the exchange of encoders' features
Mark = Any  # a moment: seconds of the host's clock, or an event of the device


@dataclass(frozen=True)
class What:
    """The activity of a span."""

    kind: Kind  # action: of the step's schedule; compute; link: communication; wait: for communication
    name: str  # name of the activity, such as experts or dispatch, or the action
    phase: Phase | None = None  # phase of the step; None: an action
    layer: str | None = None  # name of the layer's module; None: an action
    chunk: int | None = None  # chunk of the layer's experts; None: all experts


@dataclass(frozen=True)
class Span:
    """A time span; ``start`` and ``end`` are seconds since the start of the recording."""

    what: What
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


@dataclass(frozen=True)
class Recorded:
    """A recording that ``began`` at a time since 1970, with spans in the order in which they ended."""

    began: float
    seconds: float
    spans: tuple[Span, ...]


class SpanRecorder:
    """Records spans between :meth:`begin` and :meth:`end`, on CUDA by events, so that recording never waits."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.is_on = False
        self._has_events = torch.device(device).type == "cuda"
        self._spans: list[tuple[What, Mark, Mark]] = []
        self._began = 0.0
        self._first: Mark = None

    def begin(self) -> None:
        """Start recording."""
        self.is_on, self._spans = True, []
        self._began, self._first = time.time(), self.mark()

    def mark(self) -> Mark:
        """Return the current moment: the host's clock, or an event in the device's stream."""
        if not self._has_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, what: What) -> Iterator[None]:
        """Record what runs inside, if the recorder is on."""
        start = self.mark() if self.is_on else None
        yield
        if start is not None:
            self.add(what, start, self.mark())

    def add(self, what: What, start: Mark, end: Mark) -> None:
        """Add a span between two marks; ignored if the recording has ended."""
        if self.is_on:
            self._spans.append((what, start, end))

    def end(self) -> Recorded:
        """Stop recording, wait for the device, and return the spans."""
        last = self.mark()
        self.is_on = False
        if self._has_events:
            last.synchronize()
        spans, self._spans = self._spans, []
        recorded = tuple(Span(what, self._since(start), self._since(end)) for what, start, end in spans)
        return Recorded(self._began, self._since(last), recorded)

    def _since(self, mark: Mark) -> float:
        return self._first.elapsed_time(mark) / 1e3 if self._has_events else mark - self._first
