"""Take the files out of message parts, which have them as OpenAI, Qwen or HF chat templates write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np

from omnitrain.data.sources.inline_files import as_file, bytes_of_text
from omnitrain.data.sources.reading import READING_KEYS, reading_keys
from omnitrain.data.sources.turns import MARKERS

# Type of a part -> its modality. Parts whose type is a modality may have a file, the others must have one.
_MODALITIES = {kind: m for m in MARKERS for kind in (m, f"{m}_url", f"input_{m}")}
_EXPECTED = (
    "expected a path, a URL, a data: URL, base64, bytes, a PIL image, an array, or an object with url, path, bytes or "
    "data (base64)"
)
FILE_KEYS = frozenset({"bytes", "path", "url", "data", "array", "sampling_rate", *READING_KEYS})  # of a file's object


@dataclass(frozen=True)
class _GivenFile:
    """The file of a part, None if it has none, and the keys that say how it is read."""

    file: Any
    said: Mapping[str, Any]

    @property
    def with_said(self) -> Any:
        """The file, as an object if anything is said of it."""
        if self.file is None or not self.said:
            return self.file
        kind = "bytes" if isinstance(self.file, bytes) else "path"
        return {**(self.file if isinstance(self.file, dict) else {kind: self.file}), **self.said}


def modality_of_type(kind: Any) -> Any:
    """Return the modality of a type of parts; other types stay as they are."""
    return _MODALITIES.get(kind, kind) if isinstance(kind, str) else kind


def is_file(value: Any) -> bool:
    """Whether a value of a media column is a file; null, an empty path and empty bytes are not."""
    if isinstance(value, dict):
        return any(map(is_file, value.values()))
    return value.size > 0 if isinstance(value, np.ndarray) else bool(value)


def take_files(messages: Sequence[Any], media: Mapping[str, Sequence[Any]]) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return messages whose media parts have no files, and the row's files in the order of its parts.

    A part without a file shows the next one of the row's columns (modality -> files). Messages of another form stay as
    they are. Raises ValueError: a part has no file that can be read; the text names the part.
    """
    shown: dict[str, list[_GivenFile]] = {modality: [] for modality in media}
    plain = [_without_files(message, f"message {n}", shown) for n, message in enumerate(messages, 1)]
    return plain, {modality: _merged(shown[modality], files) for modality, files in media.items()}


def _without_files(message: Any, where: str, shown: dict[str, list[_GivenFile]]) -> Any:
    """Return a message without files and how they are read, and append the file of each media part to ``shown``."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = enumerate(message["content"], 1)
    return message | {"content": [_without_file(part, f"part {n} of {where}", shown) for n, part in parts]}


def _without_file(part: Any, where: str, shown: dict[str, list[_GivenFile]]) -> Any:
    """The same for a part; what is left in it has no effect."""
    kind = part.get("type") if isinstance(part, dict) else None
    modality = modality_of_type(kind)
    if not isinstance(kind, str) or modality not in shown:
        return part
    keys = dict.fromkeys((kind, modality, f"{modality}_url", "url", "path", "base64"))
    given = {key: part[key] for key in keys if part.get(key) is not None}
    what = f"{where} ({kind})"
    if len(given) > 1:
        raise ValueError(f"{what}: found {sorted(given)}; expected one of them")
    if not given:
        if kind != modality:
            raise ValueError(f"{what} has no file: {_EXPECTED} in {kind!r}")
        shown[modality].append(_GivenFile(None, reading_keys(part)))
        return {name: value for name, value in part.items() if name not in READING_KEYS} | {"type": modality}
    ((key, value),) = given.items()
    inside = value if isinstance(value, dict) else {}
    shown[modality].append(_GivenFile(_file_of(value, key, what), reading_keys(part) | reading_keys(inside)))
    return {n: v for n, v in (inside | part).items() if n not in {key, *FILE_KEYS}} | {"type": modality}


def _file_of(value: Any, key: str, what: str) -> Any:
    """Return bytes, or a path or URL, of the value of a part."""
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes):
            return value["bytes"]
        if value.get("data"):
            return _decoded(value["data"], what)
        value = as_file(value)["bytes"] if value.get("array") is not None else value.get("url") or value.get("path")
    if key == "base64" and isinstance(value, str):
        return _decoded(value, what)
    try:
        file = as_file(value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if not isinstance(file, (str, bytes)) or not file:
        raise ValueError(f"{what}: found {value!r} in {key!r}; {_EXPECTED}")
    return url2pathname(urlsplit(file).path) if isinstance(file, str) and file.startswith("file://") else file


def _decoded(text: Any, what: str) -> bytes:
    try:
        return bytes_of_text(text)
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from None


def _merged(shown: Sequence[_GivenFile], column: Sequence[Any]) -> list[Any]:
    """Return the files of parts; those without one have the next file of the column."""
    if not any(part.file is not None or part.said for part in shown):
        return list(column)
    following = iter(column)
    files = [replace(part, file=next(following, None)) if part.file is None else part for part in shown]
    return [part.with_said for part in files] + list(following)
