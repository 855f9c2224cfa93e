"""Find out whether a file was cut, from the sizes that its container writes down.

A cut download still decodes, up to where it ends. MP4, MOV, Matroska, WebM, AVI and WebP say how long they are.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import BinaryIO

_MKV_SEGMENT = b"\x18\x53\x80\x67"
_BOXES = (b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"mfra", b"sidx", b"wide", b"free", b"skip", b"uuid")
_TO_THE_END = (0, 0xFFFFFFFF)  # what a writer that cannot go back leaves in a RIFF header


def require_uncut(stream: BinaryIO) -> None:
    """Check that a video file has all bytes that its container promises. Other containers pass.

    Raises:
        ValueError: it was cut.
    """
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
