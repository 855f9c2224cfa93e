"""Take the files out of message parts, which have them as OpenAI, Qwen or HF chat templates write them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from omnitrain.data.sources.turns import MARKERS

# Type of a part -> its modality. Parts whose type is a modality may have a file, the others must have one.
_MODALITIES = {kind: m for m in MARKERS for kind in (m, f"{m}_url", f"input_{m}")}
_EXPECTED = "expected a path, a URL, a data: URL, bytes, or an object with url, path, bytes or data (base64)"
_TIMES = ("start", "stop")
FILE_KEYS = frozenset({"bytes", "path", "url", "data", *_TIMES})  # of an object that is a file


def modality_of_type(kind: Any) -> Any:
    """Return the modality of a type of parts; other types stay as they are."""
    return _MODALITIES.get(kind, kind) if isinstance(kind, str) else kind


def take_files(messages: Any, media: Mapping[str, Sequence[Any]]) -> tuple[Any, dict[str, list[Any]]]:
    """Return messages whose media parts have no files, and the files of the row in the order of its parts.

    A part without a file shows the next file of the row's column, as if the others were not there.

    Args:
        messages: ``[{"role": ..., "content": str | [part, ...]}, ...]``. Anything else is returned unchanged.
        media: modality -> files in the row's columns.

    Raises:
        ValueError: a part has no file that can be read; the text names the part.
    """
    if not isinstance(messages, list):
        return messages, {modality: list(files) for modality, files in media.items()}
    shown: dict[str, list[Any]] = {modality: [] for modality in media}
    plain = [_without_files(message, f"message {n}", shown) for n, message in enumerate(messages, 1)]
    return plain, {modality: _merged(shown[modality], files) for modality, files in media.items()}


def _without_files(message: Any, where: str, shown: dict[str, list[Any]]) -> Any:
    """Return a message without files, and append the file of each media part (None: it has none) to ``shown``.

    What is left in a part has no effect.
    """
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for n, part in enumerate(message["content"], 1):
        kind = part.get("type") if isinstance(part, dict) else None
        modality = modality_of_type(kind)
        if not isinstance(kind, str) or modality not in shown:
            parts.append(part)
            continue
        keys = dict.fromkeys((kind, modality, f"{modality}_url", "url", "path", "base64"))
        given = {key: part[key] for key in keys if part.get(key) is not None}
        what = f"part {n} of {where} ({kind})"
        if len(given) > 1:
            raise ValueError(f"{what}: found {sorted(given)}; expected one of them")
        if not given and kind != modality:
            raise ValueError(f"{what} has no file: {_EXPECTED} in {kind!r}")
        shown[modality].append(next((_part_of_file(part, value, key, what) for key, value in given.items()), None))
        read = {*given, *FILE_KEYS} if given else {}
        inside = [value for value in given.values() if isinstance(value, dict)]
        rest = {name: value for keys in (*inside, part) for name, value in keys.items() if name not in read}
        parts.append(rest | {"type": modality})
    return message | {"content": parts}


def _part_of_file(part: dict[str, Any], value: Any, key: str, what: str) -> Any:
    """Return a file, or with ``start`` or ``stop`` (seconds) of the part or its value, an object with these."""
    file, given = _file_of(value, key, what), part | (value if isinstance(value, dict) else {})
    times = {name: given[name] for name in _TIMES if given.get(name) is not None}
    return {"bytes" if isinstance(file, bytes) else "path": file} | times if times else file


def _file_of(value: Any, key: str, what: str) -> Any:
    """Return bytes, or a path or URL, of the value of a part."""
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes):
            return value["bytes"]
        if value.get("data"):
            return _decoded(value["data"], what)
        value = value.get("url") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what}: found {value!r} in {key!r}; {_EXPECTED}")
    if key == "base64":
        return _decoded(value, what)
    if value.startswith("data:"):
        head, comma, content = value.partition(",")
        if not comma:
            raise ValueError(f"{what}: found {value[:40]!r}; expected data:TYPE;base64,CONTENT")
        return _decoded(content, what) if head.endswith(";base64") else unquote_to_bytes(content)
    return url2pathname(urlsplit(value).path) if value.startswith("file://") else value


def _decoded(text: Any, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise ValueError(f"{what}: invalid base64: {error}") from None


def _merged(shown: Sequence[Any], column: Sequence[Any]) -> list[Any]:
    """Return the files of parts; those without one (None) have the next file of the column."""
    if not any(file is not None for file in shown):
        return list(column)
    following = iter(column)
    return [next(following, None) if file is None else file for file in shown] + list(following)
