"""Videos that PyAV decodes: only the frames that are needed, and those from the key frame before them."""

from __future__ import annotations

import io
import math
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from omnitrain.data.sources import clips
from omnitrain.data.sources.clips import _joined, evenly, film_clip
from omnitrain.data.sources.media import MediaFile, decode_clip, decode_soundtrack
from tests import films
from tests.films import STEP

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


@pytest.mark.second
def test_ten_minutes_cost_no_more_than_half_a_minute_for_as_many_frames() -> None:
    counts = {}
    for seconds in (30, 600):
        with av.open(io.BytesIO(film(seconds))) as container:
            counting = Counting(container)
            assert len(film_clip(counting, evenly(12), 0, math.inf).frames) == 12
            counts[seconds] = counting.num_decoded
    assert counts[30] <= 30 * FRAMES_PER_SECOND and counts[600] <= 1.5 * counts[30]


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


def grey(image: Image.Image) -> int:
    return int(np.rint(np.asarray(image)[0, 0, 0] / STEP))


@pytest.mark.parametrize(
    ("times", "heard", "click", "expected"),
    [
        ([i / 10 for i in range(40)], (0.0, 4.0), 2.0, 2.0),
        ([i / 10 for i in range(40)], (1.5, 4.0), 2.0, 2.0),
        ([0.5 + i / 10 for i in range(35)], (0.0, 4.0), 2.0, 1.5),
    ],
    ids=["together", "late", "early"],
)
def test_the_first_sample_is_heard_with_the_first_picture(
    times: list[float], heard: tuple[float, float], click: float, expected: float
) -> None:
    data = films.film(times, heard=heard, click=click)
    sound, clip = decode_soundtrack(MediaFile.of(data)), decode_clip(MediaFile.of(data), 99)
    assert sound is not None and clip.times is not None
    assert np.abs(sound.samples).argmax() / sound.rate == pytest.approx(expected, abs=0.002)
    assert len(sound.samples) / sound.rate == pytest.approx(heard[1] - times[0], abs=0.002)
    assert clip.times == pytest.approx([time - times[0] for time in times], abs=0.001)


def test_a_part_has_the_pictures_and_the_sound_of_its_seconds() -> None:
    data = films.film([i / 10 for i in range(40)], heard=(0.0, 4.0), click=2.0)
    part = MediaFile(io.BytesIO(data), 1.5, 2.5)
    clip, sound = decode_clip(part, 99), decode_soundtrack(part)
    assert [grey(frame) for frame in clip.frames] == list(range(15, 26))
    assert sound is not None and len(sound.samples) == sound.rate
    assert np.abs(sound.samples).argmax() / sound.rate == pytest.approx(0.5, abs=0.002)
    with pytest.raises(ValueError, match=r"from 4 s to 5 s; the last one begins at 3\.9 s"):
        decode_clip(MediaFile(io.BytesIO(data), 4.0, 5.0), 99)


def test_of_a_part_of_a_long_film_only_its_sound_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []
    monkeypatch.setattr(clips, "_joined", lambda found, *rest: blocks.append(len(found)) or _joined(found, *rest))
    data = films.film([float(i) for i in range(60)], heard=(0.0, 60.0), click=31.0)
    part = decode_soundtrack(MediaFile(io.BytesIO(data), 30.0, 33.0))
    assert part is not None and len(part.samples) == 3 * part.rate
    assert np.abs(part.samples).argmax() / part.rate == pytest.approx(1.0, abs=0.002)
    assert blocks == [51]  # of 600 tenths of a second: those of the part and of a second around it


def test_a_gap_in_the_sound_is_silent() -> None:
    block, rate = np.full(800, 0.5, np.float32), 8000
    whole = _joined([(1.0, block), (1.1005, block), (2.0, block)], 0.9, rate)
    loud = np.flatnonzero(whole) / rate
    assert len(whole) == round(1.2 * rate) and loud[0] == pytest.approx(0.1) and loud[1600] == pytest.approx(1.1)
    assert loud[1599] - loud[0] == pytest.approx(1599 / rate)  # rounded times leave no hole


def test_frames_of_a_variable_rate_are_evenly_spaced_in_time() -> None:
    times = [*(i / 10 for i in range(21)), *(3.0 + i for i in range(18))]  # 2 s at 10 fps, then 18 s at 1 fps
    clip = decode_clip(MediaFile.of(films.film(times)), 11)
    assert [times[grey(frame)] for frame in clip.frames] == pytest.approx([0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20])
    assert clip.times == pytest.approx([0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]) and clip.rate == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("matrix", "corner"),
    [
        *(((1, 0, 0, 1), (0, 0)), ((0, 1, -1, 0), (0, 1)), ((-1, 0, 0, -1), (1, 1)), ((0, -1, 1, 0), (1, 0))),
        *(((-1, 0, 0, 1), (0, 1)), ((1, 0, 0, -1), (1, 0)), ((0, 1, 1, 0), (0, 0)), ((0, -1, -1, 0), (1, 1))),
    ],
)
def test_pictures_are_upright_as_the_display_matrix_says(matrix: tuple[int, ...], corner: tuple[int, int]) -> None:
    """The stored picture is white in its upper left corner; ``corner`` is where a viewer sees it (lower, right)."""
    data = films.turned(films.film([0.0], "mp4", "mpeg4", size=(64, 32), white=(32, 16)), *matrix)
    picture = np.asarray(decode_clip(MediaFile.of(data), 1).frames[0])[..., 0]
    assert picture.shape == ((64, 32) if matrix[0] == 0 else (32, 64))
    halves = [np.array_split(half, 2, axis=1) for half in np.array_split(picture, 2)]
    means = np.array([[half.mean() for half in row] for row in halves])
    assert means[corner] > 200 and np.sort(means.ravel())[:3].max() < 50


@pytest.mark.parametrize("share", [0.6, 0.97])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("mp4", {}), ("mp4", {"movflags": "frag_keyframe+empty_moov"}), ("mov", {}), ("matroska", {}), ("avi", {})],
    ids=["mp4", "fragments", "mov", "matroska", "avi"],
)
def test_a_film_that_is_cut_is_damage(kind: str, options: dict[str, str], share: float) -> None:
    data = films.film([i / 10 for i in range(40)], kind, "mpeg4", size=(64, 48), options=options)
    assert len(decode_clip(MediaFile.of(data), 99).frames) == 40
    length = int(len(data) * share)
    with pytest.raises(ValueError, match=rf"unreadable video of {length} bytes: .*the file is cut: it has {length} b"):
        decode_clip(MediaFile.of(data[:length]), 4)


def test_a_film_that_was_written_as_a_stream_says_no_length() -> None:
    data = bytearray(films.film([i / 10 for i in range(40)]))
    at = data.index(b"\x18\x53\x80\x67") + 4
    data[at : at + 8] = b"\x01" + b"\xff" * 7  # unknown, as ffmpeg writes to a pipe
    assert len(decode_clip(MediaFile.of(bytes(data)), 99).frames) == 40


def test_what_follows_the_last_box_is_not_missed() -> None:
    data = films.film([0.0, 0.1], "mp4", "mpeg4", size=(64, 48))
    assert len(decode_clip(MediaFile.of(data + b"\x7f\xff\xff\xffjunk and more"), 99).frames) == 2
