"""Bytes of a file -> images, waveforms and frames. Every failure is a ``ValueError`` that says what was found."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import soundfile
from PIL import Image, ImageOps, ImageSequence

_BLOCK_FRAMES = 1 << 16

Read = TypeVar("Read")


@dataclass(frozen=True)
class Waveform:
    """Mono sound: ``samples`` is ``[n]`` float32 in [-1, 1], ``rate`` in Hz."""

    samples: np.ndarray
    rate: int

    def resampled(self, rate: int) -> Waveform:
        """The same sound at ``rate`` Hz, band-limited (in the Fourier domain)."""
        if rate == self.rate:
            return self
        length = max(1, round(len(self.samples) * rate / self.rate))
        spectrum = np.fft.rfft(self.samples)
        kept = np.zeros(length // 2 + 1, dtype=spectrum.dtype)
        shared = min(len(kept), len(spectrum))
        kept[:shared] = spectrum[:shared]
        if (shorter := min(length, len(self.samples))) % 2 == 0 and length != len(self.samples):
            # The Nyquist frequency of the shorter signal: one bin there, a pair of conjugate bins in the longer one.
            kept[shorter // 2] *= 2 if length == shorter else 0.5
        samples = np.fft.irfft(kept, length) * (length / len(self.samples))
        return Waveform(samples.astype(np.float32), rate)


def decode_image(data: bytes) -> Image.Image:
    """An RGB image, upright, from the bytes of any format that Pillow reads.

    Raises:
        ValueError: not an image, or a damaged one.
    """
    try:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        if image.mode.startswith("I"):  # 16 bits a pixel, which `convert` would clip instead of scale
            image = Image.fromarray((np.asarray(image, dtype=np.float32) / 257).clip(0, 255).astype(np.uint8))
        return image.convert("RGB")
    except Exception as error:  # damaged files raise whatever a decoder stumbles over
        raise ValueError(f"unreadable image of {len(data)} bytes: {_cause(error)}") from error


def decode_audio(data: bytes) -> Waveform:
    """A waveform from the bytes of any format that libsndfile reads (wav, flac, ogg, mp3); channels are averaged.

    Raises:
        ValueError: not a sound file, a damaged one, or one without samples.
    """
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            # In blocks: a damaged header may promise terabytes.
            blocks = [block.mean(axis=1) for block in file.blocks(_BLOCK_FRAMES, dtype="float32", always_2d=True)]
            rate = file.samplerate
    except Exception as error:  # damaged files raise whatever a decoder stumbles over
        raise ValueError(f"unreadable audio of {len(data)} bytes: {_cause(error)}") from error
    samples = np.concatenate([np.zeros(0, dtype=np.float32), *blocks])
    if not len(samples):
        raise ValueError("audio without samples")
    if not np.isfinite(samples).all():
        raise ValueError("audio with NaN or infinite samples")
    return Waveform(samples, rate)


@dataclass(frozen=True)
class Clip:
    """A video: RGB ``frames`` and how many of them pass in a second; ``rate`` is None where the file does not say."""

    frames: list[Image.Image]
    rate: float | None


def decode_video(data: bytes, max_frames: int) -> list[Image.Image]:
    """The frames of :func:`decode_clip`."""
    return decode_clip(data, max_frames).frames


def decode_clip(data: bytes, max_frames: int) -> Clip:
    """RGB frames, at most ``max_frames``, evenly spaced from first to last.

    Animated WebP, PNG and GIF are read by Pillow; everything else needs PyAV (``pip install omnitrain[video]``).

    Raises:
        ValueError: not a video, a damaged one, or PyAV is needed and missing.
    """
    try:
        clip = _pillow_clip(Image.open(io.BytesIO(data)), max_frames)
    except Exception:  # not for Pillow, or damaged: PyAV tells
        clip = _with_av(data, lambda container: _av_clip(container, max_frames))
    if not clip.frames:
        raise ValueError("video without frames")
    return clip


def decode_soundtrack(data: bytes) -> Waveform | None:
    """The sound of a video; None where it has none.

    Raises:
        ValueError: not a video, a damaged one, or PyAV is needed and missing.
    """
    try:
        Image.open(io.BytesIO(data))
    except Exception:  # not for Pillow, whose formats are silent
        return _with_av(data, _soundtrack)
    return None


@contextmanager
def costing_one_row(what: str) -> Iterator[None]:
    """Around a processor that somebody else wrote, at work on one medium: what it stumbles over must not end the run.

    Args:
        what: names the processor and the medium.

    Raises:
        ValueError: whatever it raised, but for mistakes that every medium would meet (``UserError``, ``ImportError``).
    """
    try:
        yield
    except (ValueError, ImportError):
        raise
    except Exception as error:  # clips without a window, images without a pixel: each processor stumbles in its own way
        raise ValueError(f"{what}: {_cause(error)}") from error


def _clip(frames: Sequence[tuple[float | None, Image.Image]]) -> Clip:
    times = [time for time, _ in frames if time is not None]
    seconds = times[-1] - times[0] if times and len(times) == len(frames) else 0.0
    return Clip([frame for _, frame in frames], (len(frames) - 1) / seconds if seconds > 0 else None)


def _pillow_clip(animation: Image.Image, max_frames: int) -> Clip:
    wanted = _evenly(getattr(animation, "n_frames", 1), max_frames)
    kept, clock = [], 0.0
    for number, frame in enumerate(ImageSequence.Iterator(animation)):
        if number in wanted:
            kept.append((clock, frame.convert("RGB")))
        clock += frame.info.get("duration", 0) / 1000
    return _clip(kept)


def _av_clip(container: Any, max_frames: int) -> Clip:
    stream = container.streams.video[0]
    total = stream.frames
    if not total:  # the header does not say
        total = sum(packet.size > 0 for packet in container.demux(stream))
        container.seek(0)
    wanted = _evenly(total, max_frames)
    frames = enumerate(container.decode(stream))
    return _clip([(frame.time, frame.to_image()) for number, frame in frames if number in wanted])


def _evenly(total: int, most: int) -> set[int]:
    """At most ``most`` of ``total`` indices, from the first to the last; only they are held in memory."""
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


def _with_av(data: bytes, read: Callable[[Any], Read]) -> Read:
    try:
        import av
    except ImportError:
        raise ValueError(
            f"unreadable video of {len(data)} bytes: Pillow reads animated WebP, PNG and GIF; "
            "other formats need PyAV: pip install 'omnitrain[video]'"
        ) from None
    try:
        with av.open(io.BytesIO(data)) as container:
            return read(container)
    except Exception as error:  # damaged files raise whatever a decoder stumbles over
        raise ValueError(f"unreadable video of {len(data)} bytes: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """The error in words that are the same in every run: Pillow and libsndfile name the address of a buffer."""
    return re.sub(r"<_io\.BytesIO object at 0x[0-9a-f]+>", "these bytes", f"{type(error).__name__}: {error}")
