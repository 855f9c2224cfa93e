"""Put images, sounds, spectrograms and strips of videos into a page, up to a number of bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile
from markupsafe import Markup
from PIL import Image

_PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp"}
_SOUNDS = {".wav": "audio/wav", ".flac": "audio/flac", ".ogg": "audio/ogg", ".mp3": "audio/mpeg"}
_LARGE = 50_000  # bytes from which a picture is made smaller
_LONGEST_SIDE = 320  # pixels of a picture that is made smaller
_SOUND_SECONDS = 20  # of a decoded sound that the player has
_FRAMES, _FRAME_HEIGHT = 12, 96  # most frames of a strip, and most pixels of their height
_WINDOW = 512  # samples of a spectrogram's window
_COLUMNS, _ROWS = 160, 64  # pixels of a spectrogram
_DECIBELS = 70.0  # from its brightest to its darkest pixel


class MediaBudget:
    """Makes HTML of media as long as there is room, in bytes; counts those that are ``shown`` and ``left_out``."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.left_out = self.shown = 0

    def show(self, file: Path) -> Markup:
        """Return the HTML of a medium: an image, or a spectrogram with a player; words if it cannot be shown."""
        try:
            if file.suffix in _PICTURES:
                return self._fit(_picture(file))
            if file.suffix in _SOUNDS:
                return self._fit(_sound(file))
        except (OSError, ValueError, soundfile.SoundFileError):
            return _note(f"{file.name} cannot be read")
        return _note(f"{file.name} is no image or sound")

    def image(self, image: Image.Image, words: str) -> Markup:
        """Return the HTML of a decoded image; ``words``: what it is."""
        return self._fit(_img(*_compressed(image), words))

    def frames(self, frames: Sequence[Image.Image], words: str) -> Markup:
        """Return the HTML of a video as a strip of its frames, from the first to the last."""
        kept = [frames[i] for i in np.linspace(0, len(frames) - 1, min(len(frames), _FRAMES)).round().astype(int)]
        left = f", {len(kept)} shown" if len(kept) < len(frames) else ""
        return self._fit(_img(*_compressed(_strip(kept), len(kept)), words + left))

    def sound(self, samples: np.ndarray, rate: int, words: str) -> Markup:
        """Return the HTML of a sound: a spectrogram of all of it, and a player; ``samples``: ``[n]`` float."""
        stream = io.BytesIO()
        soundfile.write(stream, samples[: _SOUND_SECONDS * rate], rate, format="FLAC")
        cut = f", of which the player has {_SOUND_SECONDS} s" if len(samples) > _SOUND_SECONDS * rate else ""
        return self._fit(_player(samples, stream.getvalue(), "audio/flac", words + cut))

    def _fit(self, html: Markup) -> Markup:
        if len(html) > self._room:
            self.left_out += 1
            return _note("left out")
        self._room -= len(html)
        self.shown += 1
        return html


def spectrogram(samples: np.ndarray) -> Image.Image:
    """Return a spectrogram of ``[n]`` float, ``n`` > 0, with low frequencies at the bottom."""
    padded = np.pad(samples, (0, max(0, _WINDOW - len(samples))))
    starts = np.linspace(0, len(padded) - _WINDOW, _COLUMNS).astype(int)
    frames = np.stack([padded[start : start + _WINDOW] for start in starts]) * np.hanning(_WINDOW)
    power = np.abs(np.fft.rfft(frames))[:, 1:].T ** 2  # [frequencies, columns]; without the mean
    rows = power.reshape(_ROWS, -1, _COLUMNS).mean(axis=1)
    level = 10 * np.log10(rows + 1e-12)
    shade = np.clip((level - level.max()) / _DECIBELS + 1, 0, 1)
    return Image.fromarray((255 * shade[::-1]).astype(np.uint8))


def _picture(file: Path) -> Markup:
    data, kind = file.read_bytes(), _PICTURES[file.suffix]
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        if len(data) > _LARGE:
            data, kind = _small(image)
    return _img(data, kind, file.name)


def _sound(file: Path) -> Markup:
    samples, rate = soundfile.read(file, always_2d=True)
    if not len(samples):
        return _note("no sound")
    data, kind = file.read_bytes(), _SOUNDS[file.suffix]
    if file.suffix == ".wav":
        stream = io.BytesIO()
        soundfile.write(stream, samples, rate, format="FLAC")
        data, kind = min((data, kind), (stream.getvalue(), "audio/flac"), key=lambda pair: len(pair[0]))
    words = f"{file.name}: {len(samples) / rate:.2f} s, 0 to {rate / 2000:g} kHz"
    return _player(samples.mean(axis=1), data, kind, words)


def _player(samples: np.ndarray, data: bytes, kind: str, words: str) -> Markup:
    picture = _img(_saved(spectrogram(samples), "PNG"), "image/png", words, "spectrogram")
    player = Markup('<audio controls preload="metadata" src="{}"></audio>').format(_uri(data, kind))
    return Markup('<span class="sound">{}{}</span>').format(picture, player)


def _img(data: bytes, kind: str, words: str, name: str = "") -> Markup:
    look = Markup(' class="{}"').format(name) if name else ""
    return Markup('<img{0} src="{1}" alt="{2}" title="{2}">').format(look, _uri(data, kind), words)


def _compressed(image: Image.Image, parts: int = 1) -> tuple[bytes, str]:
    """The bytes and the kind of an image; one that is large for its number of ``parts`` is made smaller."""
    data = _saved(image, "PNG")
    return (data, "image/png") if len(data) <= _LARGE * parts else _small(image, parts)


def _small(image: Image.Image, parts: int = 1) -> tuple[bytes, str]:
    still = image.convert("RGB")
    still.thumbnail((_LONGEST_SIDE * parts, _LONGEST_SIDE))
    return _saved(still, "JPEG"), "image/jpeg"


def _strip(frames: Sequence[Image.Image]) -> Image.Image:
    """Frames side by side, with a gap."""
    small = [frame.convert("RGBA") for frame in frames]
    for frame in small:
        frame.thumbnail((frame.width, _FRAME_HEIGHT))
    gap = max(1, small[0].width // 16)
    strip = Image.new("RGBA", (sum(f.width + gap for f in small) - gap, max(f.height for f in small)))
    left = 0
    for frame in small:
        strip.paste(frame, (left, 0))
        left += frame.width + gap
    return strip


def _saved(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, optimize=True)
    return stream.getvalue()


def _uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _note(words: str) -> Markup:
    return Markup('<span class="note">({})</span>').format(words)
