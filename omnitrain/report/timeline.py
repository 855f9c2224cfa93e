"""What the ranks of a traced step did, when, and which communication they could hide behind it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnitrain.plan.schedule.actions import ENCODES, RECEIVES, SENDS, WEIGHTS, Action, Kind

ACTIVITIES = (
    "forward",
    "backward",
    "encode",
    "exchange",
    "experts",
    "all-to-all",
    "wait",
    "message",
    "weights",
    "optimizer",
    "data",
)
_LANES = ("actions", "compute", "in transit")
Interval = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """A span of a trace.

    Attributes:
        lane: one of ``actions``, ``compute`` (what happens inside of actions, and between them), ``in transit``.
        activity: one of :data:`ACTIVITIES`.
        start: start in seconds.
        end: end in seconds.
    """

    lane: str
    activity: str
    start: float
    end: float


@dataclass(frozen=True)
class RankTime:
    """What one rank did in a traced step.

    Attributes:
        rank: the rank.
        name: its name in the trace, with its section.
        events: its spans, by their start.
    """

    rank: int
    name: str
    events: tuple[Event, ...]

    @property
    def start(self) -> float:
        """Start of its first span."""
        return min((event.start for event in self.events), default=0.0)

    @property
    def end(self) -> float:
        """End of its last span."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Activity -> seconds in which the rank did it, counted once where spans overlap."""
        return {
            activity: length(union((e.start, e.end) for e in self.events if e.activity == activity))
            for activity in ACTIVITIES
        }

    @property
    def in_transit(self) -> float:
        """Seconds in which an all-to-all or an exchange of features was in transit, or waited for."""
        return length(union([*self._links, *self._waits]))

    @property
    def exposed(self) -> float:
        """Seconds of :attr:`in_transit` in which the rank waited for it and did not compute."""
        return length(self._waits)

    @property
    def hidden(self) -> float:
        """The other seconds of :attr:`in_transit`."""
        return self.in_transit - self.exposed

    @property
    def _links(self) -> list[Interval]:
        return union((e.start, e.end) for e in self.events if e.activity == "all-to-all")

    @property
    def _waits(self) -> list[Interval]:
        return union((e.start, e.end) for e in self.events if e.activity == "wait")


def read_step(files: Mapping[int, Path]) -> list[RankTime]:
    """Read the traces of a step: rank -> file. Files that are cut or no traces are left out."""
    return [found for rank, file in files.items() if (found := _read(rank, file)) is not None]


def lanes_of(ranks: Sequence[RankTime]) -> list[tuple[RankTime, str]]:
    """Return a rank and a lane for each row of a picture; a rank has only lanes with something in them."""
    return [(rank, lane) for rank in ranks for lane in _LANES if any(event.lane == lane for event in rank.events)]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same stretches of time without overlap, ascending."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths."""
    return sum(end - start for start, end in intervals)


def _read(rank: int, file: Path) -> RankTime | None:
    try:
        every = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        names = [one["args"]["name"] for one in every if one["name"] == "process_name"]
        events = sorted(map(_event, (one for one in every if one["ph"] == "X")), key=lambda event: event.start)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return RankTime(rank, names[0] if names else f"rank {rank}", tuple(events)) if events else None


def _event(one: Mapping[str, Any]) -> Event:
    kind, start = one["cat"].split(",")[0], one["ts"] / 1e6
    lane, activity = _place(kind, one["name"])
    return Event(lane, activity, start, start + one["dur"] / 1e6)


def _place(kind: str, name: str) -> tuple[str, str]:
    if kind == "action":
        return "actions", _activity(Action.parse(name))
    if kind == "link":
        return "in transit", "all-to-all"
    if kind == "wait":
        return "compute", "data" if name == "wait for data" else "wait"
    return "compute", name if name in ("encode", "optimizer") else "experts"


def _activity(action: Action) -> str:
    if action.kind is Kind.F:
        return "forward"
    if action.kind is Kind.EXCHANGE:
        return "exchange"
    if action.kind in ENCODES:
        return "encode"
    if action.kind is Kind.RECV_F and action.stage is None:
        return "wait"  # for the features of a section; other receives return at once
    if action.kind in SENDS | RECEIVES:
        return "message"
    if action.kind in WEIGHTS:
        return "weights"
    return "optimizer" if action.kind is Kind.OPTIMIZER else "backward"
