"""A medium of a data row, decoded as the data workers decode it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

from omnitrain.data.chat.parts import MediaPart
from omnitrain.data.sources.clips import Choose, Clip
from omnitrain.data.sources.media import MediaFile, Waveform, decode_medium
from omnitrain.data.sources.rows import Row

FramesOf = Callable[[MediaPart, MediaFile], Choose]


@dataclass(frozen=True)
class ShownMedium:
    """An image, a sound, or the frames of a video; ``words`` say what it is and how large."""

    content: Image.Image | Waveform | Clip
    words: str


def medium_of(row: Row, part: MediaPart, frames: FramesOf) -> ShownMedium:
    """Decode the medium of a part of a row; ``frames`` chooses those of a video. ValueError: missing or damaged."""
    with row.open_media(part.modality, part.position) as file:
        content = decode_medium(part.modality, file, frames(part, file))
    if isinstance(content, Image.Image):
        words = f"image of {content.width} x {content.height} pixels"
    elif isinstance(content, Waveform):
        words = f"sound of {len(content.samples) / content.rate:.2f} s, {content.rate:,} Hz"
    else:
        shown, times = content.frames, content.times
        span = f", {times[0]:.1f} to {times[-1]:.1f} s" if times else ""
        words = f"video of {len(shown)} frames of {shown[0].width} x {shown[0].height} pixels{span}"
    return ShownMedium(content, words)
