"""Decode some frames of a video, chosen by their times, and its sound, placed on the clock of the frames."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from PIL import Image, ImageFile, ImageOps

_WHITES = (255, 1023, 4095, 16383, 65535)  # of 8, 10, 12, 14 and 16 bits


def as_rgb(picture: Image.Image) -> Image.Image:
    """Return an upright RGB image, white where it is transparent. ``picture`` may be changed.

    Pixels that are no bytes are scaled: 0 is black; white is 65535 in PNG; in other formats 1 for floats up to 1, else
    the largest value of the fewest bits that hold all pixels (8, 10, 12, 14 or 16), or the brightest pixel above that.
    Raises ValueError: such pixels are negative or not finite.
    """
    ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode.startswith(("I", "F")):
        picture = _scaled(np.asarray(picture), is_png=picture.format == "PNG")
    if picture.has_transparency_data:
        colors = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", colors.size, "white"), colors)
    return picture if picture.mode == "RGB" else picture.convert("RGB")  # which would copy


def _scaled(pixels: np.ndarray, *, is_png: bool) -> Image.Image:
    least, most = float(pixels.min(initial=0)), float(pixels.max(initial=0))
    if not (least >= 0 and most < np.inf):
        raise ValueError(f"its pixels are from {least:g} to {most:g}; expected numbers from 0 (black) on")
    whites = (65535,) if is_png else (1, *_WHITES) if pixels.dtype.kind == "f" else _WHITES
    white = next((white for white in whites if most <= white), most)
    return Image.fromarray(np.rint(pixels.astype(np.float32) * (255 / white)).clip(0, 255).astype(np.uint8))


Choose = Callable[[int, float | None], np.ndarray]
"""``(number of frames, frames per second or None) -> positions``, ascending, of frames that are evenly spaced in time.

Positions may be fractions. Of a real video, the frame that is nearest in time to each position is taken.
"""

_Block = tuple[float | None, np.ndarray]  # of sound: seconds of its first sample, if the file says them; its samples

_KEPT_BYTES = 1 << 28  # of an animation's frames that are decoded to find their times
_AROUND_SECONDS = 1.0  # of sound that is decoded around a part, since packets are not in the order of their times
_JOINED_SECONDS = 0.05  # blocks of sound less than this apart are one
_UPRIGHT = {  # display matrix (x from x and y, y from x and y) -> how Pillow turns the picture
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}


@dataclass(frozen=True)
class Clip:
    """Frames of a video."""

    frames: list[Image.Image]  # upright RGB; one that is shown for long may come several times
    times: tuple[float, ...] | None  # seconds of each after the file's first frame; None: the file does not say
    found: int  # frames of the file, or of the part of it that was asked for
    seconds: float | None  # how long these are shown, if the file says it

    @property
    def rate(self) -> float | None:
        """Kept frames per second of the video; None for a single frame, or without times."""
        length = self.times[-1] - self.times[0] if self.times else 0.0
        return (len(self.frames) - 1) / length if length > 0 else None


_Chosen = tuple[list[int], Callable[[list[Image.Image]], Clip]]  # indices of frames, ascending; makes their clip


def evenly(most: int) -> Choose:
    """Return a function that chooses at most ``most`` frames, evenly spaced from the first to the last."""
    return lambda total, rate: np.linspace(0, total - 1, min(total, most)).round()


def animation_clip(animation: ImageFile.ImageFile, choose: Choose, start: float, stop: float) -> Clip:
    """Decode frames of an animation with Pillow, which goes straight to a frame of AVIF; others need those before."""
    decoded: dict[int, Image.Image] = {}
    indices, clip_of = _choose(_animation_times(animation, decoded), choose, start, stop)
    wanted = dict.fromkeys(indices)
    frames = {index: as_rgb(decoded[index] if index in decoded else _frame_at(animation, index)) for index in wanted}
    return clip_of([frames[index] for index in indices])


def _animation_times(animation: ImageFile.ImageFile, decoded: dict[int, Image.Image]) -> list[float]:
    """Return when frames begin, in seconds, and keep those decoded for it; of AVIF, the last is enough."""
    total = getattr(animation, "n_frames", 1)
    if animation.format == "AVIF":
        decoded[total - 1] = _frame_at(animation, total - 1)
        return list(np.linspace(0, animation.info["timestamp"] / 1000, total).tolist())
    begins = [0.0]
    has_room = total * animation.width * animation.height * 4 <= _KEPT_BYTES
    for index in range(total):
        frame = _frame_at(animation, index)
        begins.append(begins[-1] + animation.info.get("duration", 0) / 1000)
        if has_room:
            decoded[index] = frame
    return begins[:-1]


def _frame_at(animation: ImageFile.ImageFile, index: int) -> Image.Image:
    animation.seek(index)
    return animation.copy()


def film_clip(container: Any, choose: Choose, start: float, stop: float) -> Clip:
    """Decode frames of a video with PyAV, each from the key frame before it. Packets have the times of all frames."""
    stream = container.streams.video[0]
    facts = [(p.pts, p.dts, p.is_keyframe, p.is_discard) for p in container.demux(stream) if p.size]
    if any(pts is None for pts, *_ in facts):
        return _clip_without_times(container, stream, len(facts), choose, start, stop)
    shown = sorted(pts for pts, _, _, is_left_out in facts if not is_left_out)
    keys = sorted((pts, dts) for pts, dts, is_key, _ in facts if is_key)
    times = [float((time - shown[0]) * stream.time_base) for time in shown]
    indices, clip_of = _choose(times, choose, start, stop)
    wanted = dict.fromkeys(shown[index] for index in indices)
    frames = dict(zip(wanted, map(_upright, _frames_at(container, stream, keys, wanted)), strict=True))
    return clip_of([frames[shown[index]] for index in indices])


def _frames_at(
    container: Any, stream: Any, keys: Sequence[tuple[int, int | None]], times: Iterable[int]
) -> Iterator[Any]:
    """Yield the frame that is shown at each of ``times``, ascending; ``keys``: see :func:`_frames_from`."""
    decoded: Iterator[Any] = iter(())
    frame = None
    for time in times:
        key = keys[max(0, bisect_right(keys, time, key=itemgetter(0)) - 1)]
        if frame is None or key[0] > frame.pts:  # else the frames up to this one are decoded anyway
            decoded = _frames_from(container, stream, key, time)
        while frame is None or frame.pts < time:
            following = next(decoded, None)
            if following is None:  # the decoder leaves frames out that it cannot make
                break
            frame = following
        if frame is None:
            raise ValueError("no frame can be decoded")
        yield frame


def _clip_without_times(container: Any, stream: Any, total: int, choose: Choose, start: float, stop: float) -> Clip:
    """Decode all frames of an old format that gives none of their times; the stream's rate is all that is known."""
    rate = float(stream.average_rate or 0)
    indices, clip_of = _choose([index / rate if rate else 0.0 for index in range(total)], choose, start, stop)
    container.seek(0)
    frames = {i: _upright(frame) for i, frame in enumerate(container.decode(stream)) if i in set(indices)}
    return clip_of([frames[index] for index in indices])


def _choose(times: Sequence[float], choose: Choose, start: float, stop: float) -> _Chosen:
    """Choose frames that begin from ``start`` to ``stop``, seconds after the first; ValueError: none, or no times."""
    if not times:
        raise ValueError("video without frames")
    if len(times) > 1 and times[-1] <= times[0]:
        if (start, stop) != (0.0, np.inf):
            raise ValueError("the video does not say when its frames begin, so no part of it can be read")
        indices: list[int] = choose(len(times), None).round().astype(int).tolist()
        return indices, partial(Clip, times=None, found=len(times), seconds=None)
    begun = np.array(times)
    within = np.flatnonzero((begun >= start) & (begun <= stop))
    if not len(within):
        until = f"to {stop:g} s" if stop < np.inf else "on"
        raise ValueError(
            f"no frame of the video begins from {start:g} s {until}; the last one begins at {times[-1]:g} s"
        )
    part = begun[within]
    if part[-1] <= part[0]:
        return [int(within[0])], partial(Clip, times=(float(part[0]),), found=len(part), seconds=None)
    rate = (len(part) - 1) / float(part[-1] - part[0])
    kept = _nearest(part, part[0] + choose(len(part), rate) / rate)
    kept_times = tuple(part[kept].tolist())
    return within[kept].tolist(), partial(Clip, times=kept_times, found=len(part), seconds=len(part) / rate)


def _nearest(times: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the index of the time next to each wanted one; of two, the earlier."""
    after = np.searchsorted(times, wanted).clip(1, len(times) - 1)
    return np.where(wanted - times[after - 1] <= times[after] - wanted, after - 1, after)


def _frames_from(container: Any, stream: Any, key: tuple[int, int | None], time: int) -> Iterator[Any]:
    """Return frames from a key frame on, not after ``time``; ``key``: when it is shown, and decoded (for AVI)."""
    for start in key:
        if start is not None:
            container.seek(start, stream=stream)
            frames = container.decode(stream)
            first = next(frames, None)
            if first is not None and first.pts <= time:
                return chain([first], frames)
    container.seek(0)
    return iter(container.decode(stream))


def _upright(frame: Any) -> Image.Image:
    """Return a frame as an image, turned as the video's display matrix says."""
    image: Image.Image = frame.to_image()
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return image
    a, b, _, c, d, *_ = np.rint(np.frombuffer(matrix, np.int32) / 65536).tolist()
    turn = _UPRIGHT.get((a, b, c, d))
    return image if turn is None else image.transpose(turn)


def film_sound(container: Any, start: float, stop: float) -> tuple[np.ndarray, int] | None:
    """Decode the mono sound of a video with PyAV: ``[samples]`` float32 and their rate in Hz; None: it has no sound.

    Its first sample is heard with the first frame of the part; where the film has no sound, it is silent.
    """
    if not container.streams.audio:
        return None
    blocks, shown = _sound_around(container, start, stop)
    rate = container.streams.audio[0].rate
    zero = next((time for time in shown if time >= shown[0] + start), None)
    samples = _joined(blocks, zero, rate)
    if zero is not None and stop < np.inf:
        samples = samples[: max(0, round((shown[0] + stop - zero) * rate))]
    return (samples, rate) if len(samples) else None


def _sound_around(container: Any, start: float, stop: float) -> tuple[list[_Block], list[float]]:
    """Decode the mono sound of a part and around it, and say when each frame is shown, ascending, on the same clock."""
    import av

    heard, seen = container.streams.audio[0], next(iter(container.streams.video), None)
    resampler = av.AudioResampler(format="flt", layout="mono", rate=heard.rate)
    blocks: list[_Block] = []
    shown: list[float] = []
    for packet in container.demux([stream for stream in (heard, seen) if stream is not None]):
        time = None if packet.pts is None else float(packet.pts * packet.time_base)
        after = start if time is None or not shown else time - shown[0]
        is_near = start - _AROUND_SECONDS <= after <= stop + _AROUND_SECONDS
        if packet.stream is heard and is_near:
            frames = [*packet.decode(), *(() if packet.size else (None,))]
            made = [block for frame in frames for block in resampler.resample(frame)]
            blocks += [(block.time, block.to_ndarray().reshape(-1)) for block in made]
        elif packet.stream is seen and time is not None and not packet.is_discard:
            shown.append(time)
    return blocks, sorted(shown)


def _joined(blocks: Sequence[_Block], zero: float | None, rate: int) -> np.ndarray:
    """Put each block of sound at its time after ``zero`` (None: after the first block); times are rounded in files."""
    placed: list[tuple[int, np.ndarray]] = []
    end = 0
    for time, samples in blocks:
        zero = time if zero is None else zero
        begin = end if time is None or zero is None else round((time - zero) * rate)
        if placed and abs(begin - end) < _JOINED_SECONDS * rate:
            begin = end
        placed.append((begin, samples))
        end = begin + len(samples)
    whole = np.zeros(max((begin + len(samples) for begin, samples in placed), default=0), dtype=np.float32)
    for begin, samples in placed:
        heard = samples[max(0, -begin) :]
        whole[max(0, begin) : max(0, begin) + len(heard)] = heard
    return whole
