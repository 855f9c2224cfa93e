"""What ran when in a step: spans on the host's clock, or on the device's where work is only handed to it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["compute", "link", "wait"]
Phase = Literal["forward", "recompute", "backward"]
Mark = Any  # a moment: seconds of the host's clock, or an event of the device


@dataclass(frozen=True)
class What:
    """What a span is of.

    Attributes:
        kind: ``compute``; ``link``: on its way; ``wait``: nothing could be computed meanwhile.
        name: such as ``experts`` or ``dispatch``.
        phase: of a step.
        layer: name of its module.
        chunk: of the layer's experts; None: of all.
    """

    kind: Kind
    name: str
    phase: Phase
    layer: str
    chunk: int | None = None


@dataclass(frozen=True)
class Span:
    """From when to when.

    Attributes:
        what: it was.
        start: seconds since the recording began.
        end: the same.
    """

    what: What
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True)
class Recorded:
    """What :class:`SpanRecorder` recorded.

    Attributes:
        began: seconds since 1970.
        seconds: from begin to end.
        spans: in the order in which they ended.
    """

    began: float
    seconds: float
    spans: tuple[Span, ...]


class SpanRecorder:
    """Records spans between :meth:`begin` and :meth:`end`, and nothing outside.

    Moments of a CUDA device are events on its current stream, read at the end: no step waits for its recording.

    Args:
        device: that computes.

    Attributes:
        is_on: spans are recorded now. Who measures asks first: off, it costs no more than that.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.is_on = False
        self._has_events = torch.device(device).type == "cuda"
        self._spans: list[tuple[What, Mark, Mark]] = []
        self._began = 0.0
        self._first: Mark = None

    def begin(self) -> None:
        """From now on."""
        self.is_on, self._spans = True, []
        self._began, self._first = time.time(), self.mark()

    def mark(self) -> Mark:
        """Now, as the device will come to it."""
        if not self._has_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, what: What, start: Mark, end: Mark) -> None:
        """A span between two marks; one that ends behind the recording's end is left out."""
        if self.is_on:
            self._spans.append((what, start, end))

    def end(self) -> Recorded:
        """Waits for the device."""
        last = self.mark()
        self.is_on = False
        if self._has_events:
            last.synchronize()
        spans, self._spans = self._spans, []
        found = tuple(Span(what, self._since(start), self._since(end)) for what, start, end in spans)
        return Recorded(self._began, self._since(last), found)

    def _since(self, mark: Mark) -> float:
        return self._first.elapsed_time(mark) / 1e3 if self._has_events else mark - self._first
