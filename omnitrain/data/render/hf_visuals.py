"""Give the keys `fps`, `max_frames`, `min_pixels` and `max_pixels` to a HF processor of images or videos.

What it reads is found by asking it: its frames for two rates, and its patches of a large picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.video_utils import VideoMetadata

from omnitrain.data.sources.clips import Choose, Clip, evenly
from omnitrain.data.sources.reading import Reading
from omnitrain.errors import UserError

MOST_FRAMES = 768  # of a processor without a limit of its own; Qwen's utilities have the same
_DEFAULT_FPS = 2.0  # of a processor that reads a rate and has none; Qwen's utilities have the same
_SIDE, _PIXELS = 1 << 16, 1 << 18  # of a picture that is reduced, and of what is left of it


@dataclass(frozen=True)
class FrameChoice:
    """Which frames a HF video processor gets: a number of them, or as its ``sample_frames`` chooses."""

    component: Any  # the video processor; None: there is none
    arguments: Mapping[str, Any]  # of its call in the recipe
    reading: Reading  # what the video's part, its data set or the recipe says

    def choose(self) -> Choose:
        """Return the function for ``decode_clip``; UserError: the processor reads no rate, and ``reading`` has one."""
        if self.reading.num_frames is not None:
            return evenly(self.reading.num_frames)
        if self.reading.fps is not None and self._sampler is not None:
            of_rates = {len(self._sampled(600, 10.0, rate)) for rate in (1.0, 0.5)}  # frames of a minute
            if len(of_rates) == 1:
                name = type(self.component).__name__
                raise UserError(f"fps: {name} chooses frames without a rate; remove it, or set `max_frames`")
        return self._chosen

    def is_lowered(self, clip: Clip) -> bool:
        """Whether a limit of frames lowered the rate at which ``clip`` is read; processors round by two frames."""
        if self.reading.num_frames is not None or (self._fps is None and self._num_frames is not None):
            return False
        return len(clip.frames) < self._asked(clip.found, clip.seconds) - 2

    def _asked(self, total: int, seconds: float | None) -> int:
        return total if self._fps is None or seconds is None else min(total, max(1, round(seconds * self._fps)))

    @property
    def _sampler(self) -> Any:
        """The processor's function that chooses frames; None: it has none, or the recipe switches it off."""
        is_off = self.arguments.get("do_sample_frames") is False
        return None if is_off else getattr(self.component, "sample_frames", None)

    @property
    def _num_frames(self) -> int | None:
        return self.arguments.get("num_frames") or getattr(self.component, "num_frames", None)

    @property
    def _said_fps(self) -> float | None:
        return self.reading.fps or self.arguments.get("fps")

    @property
    def _fps(self) -> float | None:
        """The rate that is asked for; None: all frames, or a number of them."""
        if fps := self._said_fps or getattr(self.component, "fps", None):
            return float(fps)
        return _DEFAULT_FPS if self._sampler is not None and self._num_frames is None else None

    @property
    def _limit(self) -> int:
        own = self.arguments.get("max_frames"), getattr(self.component, "max_frames", None)
        return min((limit for limit in (self.reading.max_frames, *own) if limit is not None), default=MOST_FRAMES)

    def _chosen(self, total: int, rate: float | None) -> np.ndarray:
        asked = self._asked(total, total / rate if rate else None)
        least = getattr(self.component, "min_frames", None) or 1
        if self._sampler is None or rate is None or total <= least or (self._fps is not None and asked >= total):
            return evenly(min(max(asked, least), self._limit))(total, rate)
        positions = self._sampled(total, rate, self._said_fps)
        has_room = len(positions) <= self._limit
        return positions if has_room else np.linspace(positions[0], positions[-1], self._limit)

    def _sampled(self, total: int, rate: float, fps: float | None) -> np.ndarray:
        """Return the frames that the processor chooses of a video of constant rate."""
        said = {name: value for name, value in self.arguments.items() if name not in ("do_sample_frames", "num_frames")}
        if self.reading.max_frames is not None:
            said["max_frames"] = self.reading.max_frames
        if fps is None and self._num_frames is not None:
            said["num_frames"] = min(self._num_frames, total)
        elif fps is None and getattr(self.component, "fps", None) is None:
            fps = _DEFAULT_FPS
        metadata = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
        return np.sort(np.asarray(self._sampler(metadata=metadata, **said | {"fps": fps}), dtype=np.float64))


def pixel_arguments(
    component: Any, arguments: Mapping[str, Any], reading: Reading, num_frames: int = 0
) -> dict[str, Any]:
    """Return arguments that keep limits of pixels (``num_frames`` 0: of an image); UserError: it has no such."""
    least, most = reading.min_pixels, reading.max_pixels
    if least is None and most is None:
        return {}
    own = dict(arguments.get("size") or getattr(component, "size", None) or {})
    name = type(component).__name__
    if not (own.get("shortest_edge") and own.get("longest_edge") and hasattr(component, "merge_size")):
        key = "min_pixels" if most is None else "max_pixels"
        raise UserError(f"{key}: {name} does not choose the size of a picture by its pixels (size: {own}); remove it")
    if least is not None and most is not None and least > most:
        raise UserError(f"min_pixels {least} is above max_pixels {most}; exchange them")
    counted = _pictures_counted(component, num_frames)
    shortest = own["shortest_edge"] if least is None else least * counted
    longest = own["longest_edge"] if most is None else most * counted
    if least is None:
        shortest = min(shortest, longest)
    return {"size": {"shortest_edge": shortest, "longest_edge": max(shortest, longest)}}


def _pictures_counted(component: Any, num_frames: int) -> int:
    """Return how many pictures the processor's limit of pixels is for: one, or all frames of a video."""
    limit = max(1, num_frames) * _PIXELS
    size = {"size": {"shortest_edge": 1, "longest_edge": limit}, "min_pixels": 1, "max_pixels": limit}
    if num_frames:
        counts = getattr(component, "get_num_of_video_patches", None)
        patches = counts and counts(num_frames, _SIDE, _SIDE, size) / -(-num_frames // component.temporal_patch_size)
    else:
        counts = getattr(component, "get_number_of_image_patches", None)
        patches = counts and counts(_SIDE, _SIDE, size)
    return max(1, round(limit / (patches * component.patch_size**2))) if patches else 1
