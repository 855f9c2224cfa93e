"""Videos that PyAV decodes: only the frames that are needed, and those from the key frame before them."""

from __future__ import annotations

import io
import math
from typing import Any

import av
import numpy as np
import pytest

from omnitrain.data.sources.clips import evenly, film_clip
from omnitrain.data.sources.media import MediaFile, decode_clip, decode_soundtrack

FRAMES_PER_SECOND = 4


def film(seconds: int, kind: str = "mp4", **options: Any) -> bytes:
    """A video of noise with a key frame every three seconds, and frames between that refer to later ones."""
    stream, random = io.BytesIO(), np.random.default_rng(0)
    with av.open(stream, "w", format=kind) as container:
        video = container.add_stream("mpeg4", rate=FRAMES_PER_SECOND)
        video.width, video.height, video.gop_size, video.max_b_frames = 64, 48, 3 * FRAMES_PER_SECOND, 2
        for _ in range(seconds * FRAMES_PER_SECOND):
            picture = random.integers(0, 255, (48, 64, 3), dtype=np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(video.encode())
    return stream.getvalue()


class Counting:
    """A container that counts the frames that are decoded."""

    def __init__(self, container: Any) -> None:
        self._container, self.num_decoded = container, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)

    def decode(self, stream: Any) -> Any:
        for frame in self._container.decode(stream):
            self.num_decoded += 1
            yield frame


def test_half_an_hour_costs_no_more_than_half_a_minute_for_as_many_frames() -> None:
    counts = {}
    for seconds in (30, 1800):
        with av.open(io.BytesIO(film(seconds))) as container:
            counting = Counting(container)
            assert len(film_clip(counting, evenly(12), 0, math.inf).frames) == 12
            counts[seconds] = counting.num_decoded
    assert counts[30] <= 30 * FRAMES_PER_SECOND and counts[1800] <= 1.5 * counts[30]


@pytest.mark.parametrize("kind", ["mp4", "matroska", "avi"])
@pytest.mark.parametrize("most", [1, 2, 7, 40, 1000])
def test_frames_and_rate_are_those_of_decoding_all(kind: str, most: int) -> None:
    data = film(30, kind)
    with av.open(io.BytesIO(data)) as container:
        every = [(frame.time, frame.to_image().tobytes()) for frame in container.decode(video=0)]
    wanted = np.unique(np.linspace(0, len(every) - 1, min(most, len(every))).round().astype(int))
    clip = decode_clip(MediaFile.of(data), most)
    assert [frame.tobytes() for frame in clip.frames] == [every[index][1] for index in wanted]
    if most > 1:
        assert clip.rate == pytest.approx((len(wanted) - 1) / (every[-1][0] - every[0][0]))


def test_the_sound_of_a_film_is_read_with_its_rate() -> None:
    stream = io.BytesIO()
    tone = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    with av.open(stream, "w", format="matroska") as container:
        sound = container.add_stream("pcm_s16le", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray((tone * 32_767).astype(np.int16)[None], format="s16", layout="mono")
        frame.rate = 16_000
        for packet in (*sound.encode(frame), *sound.encode()):
            container.mux(packet)
    waveform = decode_soundtrack(MediaFile.of(stream.getvalue()))
    assert waveform is not None and waveform.rate == 16_000
    np.testing.assert_allclose(waveform.samples, tone, atol=1e-4)
    assert decode_soundtrack(MediaFile.of(film(1))) is None


def test_a_film_that_is_cut_is_damage() -> None:
    data = film(2)
    with pytest.raises(ValueError, match=f"unreadable video of {len(data) // 2} bytes"):
        decode_clip(MediaFile.of(data[: len(data) // 2]), 4)
