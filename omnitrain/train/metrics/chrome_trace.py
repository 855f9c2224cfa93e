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
    """Write the spans of a step on one rank, in microseconds since 1970; the file's folder is created.

    Files of several ranks can be loaded together; each rank, with the section that it is in, is a process of the trace.
    """
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
