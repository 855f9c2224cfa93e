"""Small films whose pictures say which they are, and whose sound is silent but for a click."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np

RATE = 16_000  # of the sound, Hz
STEP = 5  # grey of a picture less that of the one before
_ONE = 1 << 16  # in a display matrix


def film(
    times: Sequence[float],
    kind: str = "matroska",
    codec: str = "ffv1",
    *,
    heard: tuple[float, float] | None = None,
    click: float = 0.0,
    size: tuple[int, int] = (8, 8),
    white: tuple[int, int] = (0, 0),
    options: dict[str, str] | None = None,
) -> bytes:
    """Return a film whose i-th picture is shown at ``times[i]`` and has the grey ``STEP * i``.

    Args:
        times: seconds, ascending.
        kind: the container.
        codec: ``ffv1`` loses nothing.
        heard: when its sound begins and ends; None: it has none.
        click: when the click is heard.
        size: width and height.
        white: width and height of a white corner, the upper left one.
        options: options of the container.
    """
    stream = io.BytesIO()
    with av.open(stream, "w", format=kind, options=options or {}) as container:
        video = container.add_stream(codec, rate=30)
        video.width, video.height, video.pix_fmt = *size, "bgr0" if codec == "ffv1" else "yuv420p"
        video.codec_context.time_base = Fraction(1, 1000)
        sound = container.add_stream("pcm_s16le", rate=RATE, layout="mono") if heard else None
        for index, time in enumerate(times):
            picture = np.full((size[1], size[0], 3), STEP * index % 256, np.uint8)
            picture[: white[1], : white[0]] = 255
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts, frame.time_base = round(time * 1000), Fraction(1, 1000)
            container.mux(video.encode(frame))
        container.mux(video.encode())
        if sound is not None and heard is not None:
            for block in _blocks(*heard, click):
                container.mux(sound.encode(block))
            container.mux(sound.encode())
    return stream.getvalue()


def _blocks(start: float, stop: float, click: float) -> Any:
    samples = np.zeros(round((stop - start) * RATE), np.int16)
    at = round((click - start) * RATE)
    samples[at : at + 80] = 30_000
    for begin in range(0, len(samples), RATE // 10):
        block = av.AudioFrame.from_ndarray(samples[None, begin : begin + RATE // 10], format="s16", layout="mono")
        block.sample_rate, block.time_base, block.pts = RATE, Fraction(1, RATE), begin + round(start * RATE)
        yield block


def turned(data: bytes, a: int, b: int, c: int, d: int) -> bytes:
    """Return an MP4 file with another display matrix; see the QuickTime file format, `tkhd`."""
    at = data.index(b"tkhd") + 4 + 4 + 20 + 16
    matrix = struct.pack(">9i", a * _ONE, b * _ONE, 0, c * _ONE, d * _ONE, 0, 0, 0, 1 << 30)
    return data[:at] + matrix + data[at + 36 :]
