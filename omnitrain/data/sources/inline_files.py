"""Media that are values of a row themselves, and no files: base64, ``data:`` URLs, PIL images, arrays and sounds."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import soundfile
from PIL import Image

from omnitrain.data.sources.media import Waveform

_BASE64 = re.compile(r"[A-Za-z0-9+/]{64}")  # shorter texts, and those with a dot, are paths
_BEGINNINGS = {
    "image": (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\x00", b"MM\x00*"),
    "audio": (b"fLaC", b"OggS", b"ID3", b"\xff\xfb"),
    "video": (b"\x1aE\xdf\xa3",),
}
_IN_CONTAINERS = {b"WAVE": "audio", b"AVI ": "video", b"WEBP": "image"}  # bytes 8 to 12 of a RIFF file
_IMAGE, _SOUND = "uint8 of [height, width], or [height, width, 3 or 4]", "{array: [samples], sampling_rate: ...}"


def modality_of_bytes(data: bytes) -> str | None:
    """Return the modality of a file that begins with ``data``, at least 12 bytes; None: it is no media file."""
    if data[:4] == b"RIFF":
        return _IN_CONTAINERS.get(data[8:12])
    if data[4:8] == b"ftyp":
        return "video"
    return next((modality for modality, begin in _BEGINNINGS.items() if data.startswith(begin)), None)


def is_inline(text: str) -> bool:
    """Whether a text is a ``data:`` URL, or base64 of a media file, and no path."""
    if text.startswith("data:"):
        return True
    return _BASE64.match(text) is not None and modality_of_bytes(base64.b64decode(text[:16])) is not None


def bytes_of_text(text: str) -> bytes:
    """Return the content of a ``data:`` URL, or of base64; ValueError: it is neither."""
    if not text.startswith("data:"):
        return _decoded(text)
    head, comma, content = text.partition(",")
    if not comma:
        raise ValueError(f"found {text[:40]!r}; expected data:TYPE;base64,CONTENT")
    return _decoded(content) if head.endswith(";base64") else unquote_to_bytes(content)


def as_file(value: Any) -> Any:
    """Return a value of a media column as bytes or a path, or as an object with one of them and its other keys.

    It is a path, bytes, an object with ``bytes`` or ``path``; a ``data:`` URL, base64, a PIL image, a
    :class:`Waveform`, an array of pixels, or ``{array, sampling_rate}``. ValueError: such a value is damaged.
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return bytes_of_text(value) if is_inline(value) else value
    if isinstance(value, Image.Image):
        return _encoded(value)
    if isinstance(value, Waveform):
        return _wav(value.samples, value.rate)
    if not isinstance(value, Mapping):
        return _encoded_array(value) if hasattr(value, "__array__") else value
    if value.get("array") is not None:
        return {**value, "bytes": _wav(value["array"], value.get("sampling_rate")), "path": None, "array": None}
    path = value.get("path")
    if not value.get("bytes") and isinstance(path, str) and is_inline(path):
        return {**value, "bytes": bytes_of_text(path), "path": None}
    return value


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"invalid base64: {error}") from None


def _encoded(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    if image.mode in ("CMYK", "F", "LAB", "YCbCr"):  # PNG has no such pixels
        image.save(stream, "TIFF")
    else:
        image.save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def _encoded_array(value: Any) -> bytes:
    pixels = np.asarray(value)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or pixels.shape[2:] not in ((), (3,), (4,)):
        what = f"an array of {pixels.dtype} {list(pixels.shape)}"
        raise ValueError(f"found {what}; expected pixels ({_IMAGE}) or a sound ({_SOUND})")
    return _encoded(Image.fromarray(pixels))


def _wav(samples: Any, rate: Any) -> bytes:
    sound, stream = np.asarray(samples, dtype=np.float32), io.BytesIO()
    if not isinstance(rate, int) or rate <= 0 or sound.ndim != 1:
        raise ValueError(f"found a sound of {list(sound.shape)} samples at {rate!r} Hz; expected {_SOUND}")
    soundfile.write(stream, sound, rate, format="WAV", subtype="FLOAT")
    return stream.getvalue()
