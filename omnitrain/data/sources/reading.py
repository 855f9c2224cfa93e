"""How an image or a video is read: rate, number of frames, pixels. A part, a data set and a recipe may say it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from omnitrain.recipe.data import VISUAL_KEYS

# Key of a part or a file -> (field it sets, modalities that have it). Our own keys, and the keys of Qwen's utilities.
_KEYS = {
    "start": ("start", ("audio", "video")),
    "stop": ("stop", ("audio", "video")),
    "video_start": ("start", ("video",)),
    "video_end": ("stop", ("video",)),
    "nframes": ("num_frames", ("video",)),
    **{key: (key, modalities) for key, modalities in VISUAL_KEYS.items()},
}
_EITHER = {"fps": "num_frames", "num_frames": "fps"}  # both say how many frames
READING_KEYS = frozenset(_KEYS)


@dataclass(frozen=True)
class Reading:
    """How a medium is read. None: not said here."""

    fps: float | None = None  # frames from a second of a video
    num_frames: int | None = None  # of a video, evenly spaced in time
    max_frames: int | None = None  # of a video
    min_pixels: int | None = None  # of an image or frame
    max_pixels: int | None = None

    def over(self, other: Reading) -> Reading:
        """Return what is said here, and for the rest what ``other`` says, unless it contradicts."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        if self.num_frames is not None:
            other = replace(other, fps=None, max_frames=None)
        elif self.fps is not None:
            other = replace(other, num_frames=None)
        if (self.min_pixels or 0) > (other.max_pixels or math.inf):
            other = replace(other, max_pixels=None)
        if (self.max_pixels or math.inf) < (other.min_pixels or 0):
            other = replace(other, min_pixels=None)
        return replace(other, **said)


UNSAID = Reading()


def reading_keys(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a part, or of a file, that say how a medium is read; null says nothing."""
    return {key: value[key] for key in _KEYS if value.get(key) is not None}


def part_and_reading(value: Any, modality: str, place: str) -> tuple[float, float | None, Reading]:
    """Return start and stop of a file's part in seconds, and how it is read; ValueError: wrong keys."""
    given = reading_keys(value) if isinstance(value, dict) else {}
    keys: dict[str, str] = {}  # what is said -> the key that says it
    for key in given:
        name, modalities = _KEYS[key]
        if modality not in modalities:
            raise ValueError(f"{place} has {key!r}, which only {' or '.join(modalities)} may have; remove it")
        if other := keys.get(name) or keys.get(_EITHER.get(name, "")):
            raise ValueError(f"{place} has {other!r} and {key!r}, which say the same; keep one")
        keys[name] = key
    said = {name: given[key] for name, key in keys.items()}
    start, stop = _part(said.pop("start", None), said.pop("stop", None), place)
    for name, number in said.items():
        if not _is_number(number) or not 0 < number < math.inf or (name != "fps" and number != int(number)):
            whole = "" if name == "fps" else "whole "
            raise ValueError(f"{place} has {keys[name]} {number!r}; expected a {whole}number above 0")
    return start, stop, Reading(**{name: number if name == "fps" else int(number) for name, number in said.items()})


def _part(start: Any, stop: Any, place: str) -> tuple[float, float | None]:
    begin, end = 0.0 if start is None else start, math.inf if stop is None else stop
    if not (_is_number(begin) and _is_number(end)) or not 0 <= begin < end:
        raise ValueError(f"{place} starts at {start!r} and stops at {stop!r}; expected seconds, start before stop")
    return float(begin), stop


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
