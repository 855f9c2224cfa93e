"""Put images, sounds and spectrograms into a page, up to a number of bytes."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

_PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp"}
_SOUNDS = {".wav": "audio/wav", ".flac": "audio/flac", ".ogg": "audio/ogg", ".mp3": "audio/mpeg"}
_LARGE = 50_000  # bytes from which a picture is made smaller
_LONGEST_SIDE = 320  # pixels of a picture that is made smaller
_WINDOW = 512  # samples of a spectrogram's window
_COLUMNS, _ROWS = 160, 64  # pixels of a spectrogram
_DECIBELS = 70.0  # from its brightest to its darkest pixel


class MediaBudget:
    """Makes HTML of media files as long as there is room.

    Args:
        room: bytes of the page for media.

    Attributes:
        left_out: number of media for which there was no room.
        shown: number of media in the page.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self.left_out = self.shown = 0

    def show(self, file: Path) -> str:
        """Return the HTML of a medium: an image, or a spectrogram with a player; words if it cannot be shown."""
        try:
            if file.suffix in _PICTURES:
                return self._fit(_picture(file))
            if file.suffix in _SOUNDS:
                return self._fit(_sound(file))
        except (OSError, ValueError, soundfile.SoundFileError):
            return _note(f"{file.name} cannot be read")
        return _note(f"{file.name} is no image or sound")

    def _fit(self, html: str) -> str:
        if len(html) > self._room:
            self.left_out += 1
            return _note("left out")
        self._room -= len(html)
        self.shown += 1
        return html


def spectrogram(samples: np.ndarray) -> Image.Image:
    """Return a spectrogram, low frequencies at the bottom.

    Args:
        samples: ``[n]`` float, one channel; ``n`` > 0.
    """
    padded = np.pad(samples, (0, max(0, _WINDOW - len(samples))))
    starts = np.linspace(0, len(padded) - _WINDOW, _COLUMNS).astype(int)
    frames = np.stack([padded[start : start + _WINDOW] for start in starts]) * np.hanning(_WINDOW)
    power = np.abs(np.fft.rfft(frames))[:, 1:].T ** 2  # [frequencies, columns]; without the mean
    rows = power.reshape(_ROWS, -1, _COLUMNS).mean(axis=1)
    level = 10 * np.log10(rows + 1e-12)
    shade = np.clip((level - level.max()) / _DECIBELS + 1, 0, 1)
    return Image.fromarray((255 * shade[::-1]).astype(np.uint8))


def _picture(file: Path) -> str:
    data, kind = file.read_bytes(), _PICTURES[file.suffix]
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        if len(data) > _LARGE:
            still = image.convert("RGB")
            still.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
            data, kind = _saved(still, "JPEG"), "image/jpeg"
    return f'<img src="{_uri(data, kind)}" alt="{escape(file.name)}">'


def _sound(file: Path) -> str:
    samples, rate = soundfile.read(file, always_2d=True)
    if not len(samples):
        return _note("no sound")
    data, kind = file.read_bytes(), _SOUNDS[file.suffix]
    if file.suffix == ".wav":
        stream = io.BytesIO()
        soundfile.write(stream, samples, rate, format="FLAC")
        data, kind = min((data, kind), (stream.getvalue(), "audio/flac"), key=lambda pair: len(pair[0]))
    picture = _saved(spectrogram(samples.mean(axis=1)), "PNG")
    words = escape(f"{file.name}: {len(samples) / rate:.2f} s, 0 to {rate / 2000:g} kHz")
    shown = f'<img class="spectrogram" src="{_uri(picture, "image/png")}" alt="{words}" title="{words}">'
    return f'<span class="sound">{shown}<audio controls preload="metadata" src="{_uri(data, kind)}"></audio></span>'


def _saved(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, optimize=True)
    return stream.getvalue()


def _uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _note(words: str) -> str:
    return f'<span class="note">({escape(words)})</span>'
