"""Decode files to images, waveforms and frames. Every failure is a ``ValueError`` with the reason.

Files are streams: of a long one on this machine, only what is decoded is read.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, BinaryIO, TypeVar

import numpy as np
import soundfile
from PIL import Image, ImageOps

_BLOCK_FRAMES = 1 << 16
_TIMED = ("AVIF", "WEBP")  # Pillow gives the time of a frame of these; of others, only its duration

Read = TypeVar("Read")


@dataclass(frozen=True)
class MediaFile:
    """An encoded file, and for sound the part of it that is decoded.

    Attributes:
        stream: the file; it can seek.
        start: where the part begins, in seconds.
        stop: where it ends; None: with the file.
    """

    stream: BinaryIO
    start: float = 0.0
    stop: float | None = None

    @classmethod
    def of(cls, data: bytes) -> MediaFile:
        """Return a whole file of ``data``."""
        return cls(io.BytesIO(data))

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stream.seek(0, io.SEEK_END)

    def begun(self) -> BinaryIO:
        """Return the stream at its first byte."""
        self.stream.seek(0)
        return self.stream


@dataclass(frozen=True)
class Waveform:
    """Mono sound: ``samples`` is ``[n]`` float32 in [-1, 1], ``rate`` in Hz."""

    samples: np.ndarray
    rate: int

    def resampled(self, rate: int) -> Waveform:
        """Return the sound resampled to ``rate`` Hz, band-limited in the Fourier domain."""
        if rate == self.rate:
            return self
        length = max(1, round(len(self.samples) * rate / self.rate))
        spectrum = np.fft.rfft(self.samples)
        kept = np.zeros(length // 2 + 1, dtype=spectrum.dtype)
        shared = min(len(kept), len(spectrum))
        kept[:shared] = spectrum[:shared]
        if (shorter := min(length, len(self.samples))) % 2 == 0 and length != len(self.samples):
            # The Nyquist frequency of the shorter signal is one bin; in the longer signal it is two conjugate bins.
            kept[shorter // 2] *= 2 if length == shorter else 0.5
        samples = np.fft.irfft(kept, length) * (length / len(self.samples))
        return Waveform(samples.astype(np.float32), rate)


def decode_image(file: MediaFile) -> Image.Image:
    """Decode an upright RGB image of any format that Pillow reads.

    Raises:
        ValueError: ``file`` is not an image, or is damaged.
    """
    try:
        image: Image.Image = Image.open(file.begun())
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I"):  # `convert` would clip 16-bit pixels instead of scaling them
            image = Image.fromarray((np.asarray(image, dtype=np.float32) / 257).clip(0, 255).astype(np.uint8))
        return image if image.mode == "RGB" else image.convert("RGB")  # which would copy
    except Exception as error:  # damaged files raise whatever a decoder stumbles over
        raise ValueError(f"unreadable image of {file.size} bytes: {_cause(error)}") from error


def decode_audio(file: MediaFile) -> Waveform:
    """Decode a sound of any format that libsndfile reads (wav, flac, ogg, mp3), and average its channels.

    Of a part of a file, only the part is read and decoded. It ends with the file if ``stop`` is later.

    Raises:
        ValueError: ``file`` is not a sound file, is damaged, has no samples, or ends before the part.
    """
    try:
        with soundfile.SoundFile(file.begun()) as sound:
            rate = sound.samplerate
            length = -1 if file.stop is None else round((file.stop - file.start) * rate)
            if file.start:
                sound.seek(min(round(file.start * rate), sound.frames))
            # Read in blocks, because a damaged header may claim terabytes.
            read = sound.blocks(_BLOCK_FRAMES, frames=length, dtype="float32", always_2d=True)
            blocks = [block.mean(axis=1) for block in read]
    except Exception as error:  # damaged files raise whatever a decoder stumbles over
        raise ValueError(f"unreadable audio of {file.size} bytes: {_cause(error)}") from error
    samples = np.concatenate([np.zeros(0, dtype=np.float32), *blocks])
    if not len(samples):
        raise ValueError(f"audio without samples{f' after {file.start:g} s' if file.start else ''}")
    if not np.isfinite(samples).all():
        raise ValueError("audio with NaN or infinite samples")
    return Waveform(samples, rate)


@dataclass(frozen=True)
class Clip:
    """A video: RGB ``frames`` and their ``rate`` per second, None if the file does not give it."""

    frames: list[Image.Image]
    rate: float | None


def decode_clip(file: MediaFile, max_frames: int) -> Clip:
    """Decode at most ``max_frames`` RGB frames, evenly spaced from first to last.

    Pillow reads animated WebP, AVIF, PNG and GIF; other formats need PyAV (``pip install omnitrain[video]``).

    Raises:
        ValueError: ``file`` is not a video, is damaged, or needs PyAV, which is missing.
    """
    try:
        clip = _pillow_clip(Image.open(file.begun()), max_frames)
    except Exception:  # a format that Pillow does not read, or a damaged file, which PyAV reports
        clip = _with_av(file, lambda container: _av_clip(container, max_frames))
    if not clip.frames:
        raise ValueError("video without frames")
    return clip


def decode_medium(modality: str, file: MediaFile, max_frames: int) -> Image.Image | Waveform | list[Image.Image]:
    """Decode an image, a sound, or at most ``max_frames`` frames of a video.

    Raises:
        ValueError: ``file`` is damaged, or not of ``modality``.
    """
    if modality == "image":
        return decode_image(file)
    if modality == "audio":
        return decode_audio(file)
    return decode_clip(file, max_frames).frames


def decode_soundtrack(file: MediaFile) -> Waveform | None:
    """Decode the sound of a video; None if it has no sound.

    Raises:
        ValueError: ``file`` is not a video, is damaged, or needs PyAV, which is missing.
    """
    try:
        Image.open(file.begun())
    except Exception:  # Pillow's formats have no sound; all others need PyAV
        return _with_av(file, _soundtrack)
    return None


@contextmanager
def costing_one_row(what: str) -> Iterator[None]:
    """Turn errors of a third-party processor into a ValueError, so that a bad medium costs one row and not the run.

    Args:
        what: text that names the processor and the medium.

    Raises:
        ValueError: the processor raised an error. Errors that concern every medium (``UserError``, ``ImportError``)
            are raised unchanged.
    """
    try:
        yield
    except (ValueError, ImportError):
        raise
    except Exception as error:  # each processor fails differently on empty clips or images without pixels
        raise ValueError(f"{what}: {_cause(error)}") from error


def _clip(frames: Sequence[tuple[float | None, Image.Image]]) -> Clip:
    times = [time for time, _ in frames if time is not None]
    seconds = times[-1] - times[0] if times and len(times) == len(frames) else 0.0
    return Clip([frame for _, frame in frames], (len(frames) - 1) / seconds if seconds > 0 else None)


def _pillow_clip(animation: Image.Image, max_frames: int) -> Clip:
    """Decode frames with Pillow. It goes straight to a frame of AVIF; others need the frames before."""
    kept, clock, after = [], 0.0, 0
    for index in sorted(_evenly(getattr(animation, "n_frames", 1), max_frames)):
        for earlier in () if animation.format in _TIMED else range(after, index):
            animation.seek(earlier)
            clock += animation.info.get("duration", 0)
        animation.seek(index)
        picture, after = animation.convert("RGB"), index
        kept.append((animation.info.get("timestamp", clock) / 1000, picture))
    return _clip(kept)


def _av_clip(container: Any, max_frames: int) -> Clip:
    """Decode the wanted frames, each from the key frame before it. The times of all frames come from their packets."""
    stream = container.streams.video[0]
    packets = [(packet.pts, packet.dts, packet.is_keyframe) for packet in container.demux(stream) if packet.size]
    wanted = sorted(_evenly(len(packets), max_frames))
    if any(time is None for time, _, _ in packets):  # an old format without times
        container.seek(0)
        frames = enumerate(container.decode(stream))
        return _clip([(frame.time, frame.to_image()) for index, frame in frames if index in wanted])
    times, keys = sorted(time for time, _, _ in packets), sorted(times[:2] for times in packets if times[2])
    kept: list[tuple[float | None, Image.Image]] = []
    decoded: Iterator[Any] = iter(())
    last = None
    for time in (times[index] for index in wanted):
        key = keys[max(0, bisect_right(keys, time, key=itemgetter(0)) - 1)]
        if last is None or key[0] > last:  # else the frames up to this one are decoded anyway
            decoded = _frames_from(container, stream, key, time)
        for frame in decoded:
            last = frame.pts
            if last >= time:
                kept.append((frame.time, frame.to_image()))
                break
    return _clip(kept)


def _frames_from(container: Any, stream: Any, key: tuple[int, int | None], time: int) -> Iterator[Any]:
    """Return the frames from a key frame on, or from one before it, but not after ``time``.

    Args:
        container: the open video.
        stream: its stream of frames.
        key: when the key frame is shown, and when it is decoded, by which some formats seek (AVI).
        time: when the wanted frame is shown.
    """
    for start in key:
        if start is not None:
            container.seek(start, stream=stream)
            frames = container.decode(stream)
            first = next(frames, None)
            if first is not None and first.pts <= time:
                return chain([first], frames)
    container.seek(0)
    return iter(container.decode(stream))


def _evenly(total: int, most: int) -> set[int]:
    """Return at most ``most`` of ``total`` indices, evenly spaced from the first to the last."""
    return set(np.linspace(0, total - 1, min(total, most)).round().astype(int).tolist())


def _soundtrack(container: Any) -> Waveform | None:
    if not container.streams.audio:
        return None
    import av

    stream = container.streams.audio[0]
    resampler = av.AudioResampler(format="flt", layout="mono", rate=stream.rate)
    blocks = [block for frame in (*container.decode(stream), None) for block in resampler.resample(frame)]
    samples = [block.to_ndarray().reshape(-1) for block in blocks]
    return Waveform(np.concatenate(samples).astype(np.float32), stream.rate) if samples else None


def _with_av(file: MediaFile, read: Callable[[Any], Read]) -> Read:
    try:
        import av
    except ImportError:
        raise ValueError(
            f"unreadable video of {file.size} bytes: Pillow reads animated WebP, AVIF, PNG and GIF; "
            "other formats need PyAV: pip install 'omnitrain[video]'"
        ) from None
    try:
        with av.open(file.begun()) as container:
            return read(container)
    except Exception as error:  # damaged files raise whatever a decoder stumbles over
        raise ValueError(f"unreadable video of {file.size} bytes: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """Return the error's text without addresses of buffers, which Pillow and libsndfile add, so that runs agree."""
    return re.sub(r"<_io\.[^>]*>", "these bytes", f"{type(error).__name__}: {error}")
