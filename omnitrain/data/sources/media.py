"""Decode files to images, waveforms and frames. Every failure is a ``ValueError`` with the reason.

Files are streams: of a long one on this machine, only what is decoded is read.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import numpy as np
import soundfile
from PIL import Image, ImageFile

from omnitrain.data.sources.clips import Choose, Clip, animation_clip, as_rgb, evenly, film_clip, film_sound
from omnitrain.data.sources.reading import UNSAID, Reading

_MKV_SEGMENT = b"\x18\x53\x80\x67"
_BOXES = (b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"mfra", b"sidx", b"wide", b"free", b"skip", b"uuid")
_TO_THE_END = (0, 0xFFFFFFFF)  # what a writer that cannot go back leaves in a RIFF header


def require_uncut(stream: BinaryIO) -> None:
    """Check that a video file has all bytes that its container promises; ValueError: it was cut."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    head = stream.read(12)
    end_of = next((end_of for is_it, end_of in _CONTAINERS if is_it(head)), None)
    end = 0 if end_of is None else end_of(stream, size)
    stream.seek(0)
    if end > size:
        raise ValueError(f"the file is cut: it has {size} bytes, but its container at least {end}")


def _riff_end(stream: BinaryIO, size: int) -> int:
    stream.seek(4)
    length = int.from_bytes(stream.read(4), "little")
    return 0 if length in _TO_THE_END else 8 + length


def _mp4_end(stream: BinaryIO, size: int) -> int:
    """Return where the last box ends. A box of length 0 ends with the file; one of length 1 has 8 more bytes for it."""
    end = 0
    while end < size:
        stream.seek(end)
        length, kind = int.from_bytes(stream.read(4), "big"), stream.read(4)
        if length == 1:
            length = int.from_bytes(stream.read(8), "big")
        if length < 8 or kind not in _BOXES:  # what is no box may follow the last one
            return 0
        end += length
    return end


def _mkv_end(stream: BinaryIO, size: int) -> int:
    """Return where the segment ends, which comes after the header."""
    stream.seek(4)
    header = _varint(stream) or 0
    stream.seek(header, io.SEEK_CUR)
    if stream.read(4) != _MKV_SEGMENT:
        return 0
    length = _varint(stream)
    return 0 if length is None else stream.tell() + length


def _varint(stream: BinaryIO) -> int | None:
    """Read a length of Matroska: as many bytes as zero bits come first, and one. None: all ones, which is unknown."""
    first = stream.read(1)[0]
    more = 8 - first.bit_length()
    value = int.from_bytes(bytes([first & (0x7F >> more)]) + stream.read(more), "big")
    return None if value == (1 << 7 * (more + 1)) - 1 else value


_CONTAINERS: tuple[tuple[Callable[[bytes], bool], Callable[[BinaryIO, int], int]], ...] = (
    (lambda head: head[:4] == b"RIFF", _riff_end),
    (lambda head: head[4:8] in _BOXES, _mp4_end),
    (lambda head: head[:4] == b"\x1a\x45\xdf\xa3", _mkv_end),
)


_BLOCK_FRAMES = 1 << 16

Read = TypeVar("Read")


@dataclass(frozen=True)
class MediaFile:
    """An encoded file, and for a sound or a video the part of it that is decoded, in seconds."""

    stream: BinaryIO  # it can seek
    start: float = 0.0
    stop: float | None = None  # None: with the file
    reading: Reading = UNSAID  # as far as its part of a message or its data set says it

    @classmethod
    def of(cls, data: bytes) -> MediaFile:
        """Return a whole file of ``data``."""
        return cls(io.BytesIO(data))

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stream.seek(0, io.SEEK_END)

    @property
    def part(self) -> tuple[float, float]:
        """Where the part starts and stops, in seconds; infinite: with the file."""
        return self.start, math.inf if self.stop is None else self.stop

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
    """Decode an upright RGB image (:func:`as_rgb`); ValueError: ``file`` is not an image, or is damaged."""
    with _readable("image", file):
        image: Image.Image = Image.open(file.begun())
        image.load()
        return as_rgb(image)


def decode_audio(file: MediaFile) -> Waveform:
    """Decode a sound, or its part, to mono as libsndfile does; ValueError: damaged, empty, ends before the part."""
    with _readable("audio", file), soundfile.SoundFile(file.begun()) as sound:
        rate = sound.samplerate
        length = -1 if file.stop is None else round((file.stop - file.start) * rate)
        if file.start:
            sound.seek(min(round(file.start * rate), sound.frames))
        # Read in blocks, because a damaged header may claim terabytes.
        read = sound.blocks(_BLOCK_FRAMES, frames=length, dtype="float32", always_2d=True)
        blocks = [block.mean(axis=1) for block in read]
    samples = np.concatenate([np.zeros(0, dtype=np.float32), *blocks])
    if not len(samples):
        raise ValueError(f"audio without samples{f' after {file.start:g} s' if file.start else ''}")
    if not np.isfinite(samples).all():
        raise ValueError("audio with NaN or infinite samples")
    return Waveform(samples, rate)


def decode_clip(file: MediaFile, max_frames: int | Choose) -> Clip:
    """Decode at most ``max_frames`` RGB frames, evenly spaced in time over the file's part, or chosen ones.

    Pillow reads animated images, PyAV (``pip install omnitrain[video]``) the others. Raises ValueError: ``file`` is no
    video, is damaged or cut, or needs PyAV, which is missing.
    """
    choose = evenly(max_frames) if isinstance(max_frames, int) else max_frames
    animation = _animation(file)
    if animation is None:
        return _with_av(file, lambda container: film_clip(container, choose, *file.part))
    with _readable("video", file):
        return animation_clip(animation, choose, *file.part)


def _animation(file: MediaFile) -> ImageFile.ImageFile | None:
    """Open a file of a format that Pillow reads; None: it is another one, or damaged."""
    try:
        image = Image.open(file.begun())
    except Exception:  # damaged files raise whatever a decoder stumbles over
        return None
    return None if image.format == "MPEG" else image  # Pillow reads only the size of an MPEG file


def decode_medium(modality: str, file: MediaFile, choose: Choose) -> Image.Image | Waveform | Clip:
    """Decode an image, a sound, or frames that ``choose`` chooses; ValueError: damaged, or no ``modality``."""
    if modality == "video":
        return decode_clip(file, choose)
    return decode_image(file) if modality == "image" else decode_audio(file)


def decode_soundtrack(file: MediaFile) -> Waveform | None:
    """Decode a video's sound from its first frame (of the part) on; None: it has none; ValueError: damaged."""
    if _animation(file) is not None:
        return None  # Pillow's formats have no sound; all others need PyAV
    sound = _with_av(file, lambda container: film_sound(container, *file.part))
    return None if sound is None else Waveform(*sound)


@contextmanager
def _readable(kind: str, file: MediaFile) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # damaged files raise whatever a decoder stumbles over
        raise ValueError(f"unreadable {kind} of {file.size} bytes: {_cause(error)}") from error


@contextmanager
def costing_one_row(what: str) -> Iterator[None]:
    """Turn errors of a HF processor, which ``what`` names, into a ValueError, which costs one row."""
    try:
        yield
    except (ValueError, ImportError):
        raise
    except Exception as error:  # each processor fails differently on empty clips or images without pixels
        raise ValueError(f"{what}: {_cause(error)}") from error


def _with_av(file: MediaFile, read: Callable[[Any], Read]) -> Read:
    try:
        import av
    except ImportError:
        raise ValueError(
            f"unreadable video of {file.size} bytes: Pillow reads animated WebP, AVIF, PNG and GIF; "
            "other formats need PyAV: pip install 'omnitrain[video]'"
        ) from None
    with _readable("video", file):
        require_uncut(file.stream)
        with av.open(file.begun()) as container:
            return read(container)


def _cause(error: Exception) -> str:
    """Return the error's text without addresses of buffers, which Pillow and libsndfile add, so that runs agree."""
    return re.sub(r"<_io\.[^>]*>", "these bytes", f"{type(error).__name__}: {error}")
