"""A medium of a data row, decoded as the data workers decode it."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from omnitrain.data.chat.parts import MediaPart
from omnitrain.data.sources.media import Waveform, decode_medium
from omnitrain.data.sources.rows import Row


@dataclass(frozen=True)
class Medium:
    """An image, a sound, or the frames of a video; ``words`` say what it is and how large."""

    content: Image.Image | Waveform | list[Image.Image]
    words: str


def medium_of(row: Row, part: MediaPart, max_frames: int) -> Medium:
    """Decode the medium of a part.

    Args:
        row: the data row.
        part: the part.
        max_frames: most frames that are read of a video.

    Raises:
        ValueError: it is missing or damaged.
    """
    with row.open_media(part.modality, part.position) as file:
        content = decode_medium(part.modality, file, max_frames)
    if isinstance(content, Image.Image):
        words = f"image of {content.width} x {content.height} pixels"
    elif isinstance(content, Waveform):
        words = f"sound of {len(content.samples) / content.rate:.2f} s, {content.rate:,} Hz"
    else:
        words = f"video of {len(content)} frames of {content[0].width} x {content[0].height} pixels"
    return Medium(content, words)
