"""Write spans as a Chrome trace for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omnitrain.ops.timing import Recorded, Span, What

# Tracks: actions of the schedule; compute and waiting of layers, within them; and one for each chunk's exchanges, which
# overlap others.
_ACTIONS, _COMPUTE, _FIRST_LINK = range(3)


_TITLES = {_ACTIONS: "actions", _COMPUTE: "compute"}


def write_chrome_trace(recorded: Recorded, file: Path, rank: int, section: str | None = None) -> None:
    """Write one rank's spans. Files of several ranks can be loaded together; each rank is a process of the trace.

    Args:
        recorded: spans of a step.
        file: path of the file; its folder is created.
        rank: rank of the spans.
        section: section of the rank. None: there are no sections.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"traceEvents": trace_events(recorded, rank, section), "displayTimeUnit": "ms"}) + "\n")


def trace_events(recorded: Recorded, rank: int, section: str | None = None) -> list[dict[str, Any]]:
    """Return track names and spans in Chrome's Trace Event Format, with times in microseconds since 1970."""
    of_section = "" if section is None else f" ({section})"
    names = [_named("process_name", rank, _COMPUTE, f"rank {rank}{of_section}")]
    names += [
        _named("thread_name", rank, track, _TITLES.get(track) or f"link, chunk {track - _FIRST_LINK}")
        for track in sorted({_track(span.what) for span in recorded.spans})
    ]
    return [*names, *(_event(span, recorded.began, rank) for span in recorded.spans)]


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
