"""Spans as a Chrome trace: for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omnitrain.ops.timing import Recorded, Span, What

_COMPUTE = 0  # the track of what is computed and of waiting; exchanges of chunk n, which overlap others, are on n + 1


def write_chrome_trace(recorded: Recorded, file: Path, rank: int) -> None:
    """Write one rank's spans; several files of a step can be loaded together, ranks are processes.

    Args:
        recorded: of a step.
        file: its folder is made.
        rank: whose.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"traceEvents": trace_events(recorded, rank), "displayTimeUnit": "ms"}) + "\n")


def trace_events(recorded: Recorded, rank: int) -> list[dict[str, Any]]:
    """Names of the tracks and then the spans, in Chrome's Trace Event Format; times in microseconds since 1970."""
    tracks = sorted({_track(span.what) for span in recorded.spans})
    names = [_named("process_name", rank, _COMPUTE, f"rank {rank}")]
    names += [_named("thread_name", rank, track, _name_of(track)) for track in tracks]
    return [*names, *(_event(span, recorded.began, rank) for span in recorded.spans)]


def _track(what: What) -> int:
    return _COMPUTE if what.kind != "link" or what.chunk is None else what.chunk + 1


def _name_of(track: int) -> str:
    return "compute" if track == _COMPUTE else f"link, chunk {track - 1}"


def _named(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": name}}


def _event(span: Span, began: float, rank: int) -> dict[str, Any]:
    what = span.what
    words = ("wait for" if what.kind == "wait" else "", what.name, "" if what.chunk is None else str(what.chunk))
    return {
        "ph": "X",
        "name": " ".join(filter(None, words)),
        "cat": f"{what.kind},{what.phase}",
        "ts": 1e6 * (began + span.start),
        "dur": 1e6 * span.seconds,
        "pid": rank,
        "tid": _track(what),
        "args": {"layer": what.layer, "phase": what.phase, "chunk": what.chunk},
    }
