"""Cache contracts on disk, so that a class and config are checked only once.

The key holds the versions of all installed packages (an optional kernel changes the forward of a layer), omnitrain's
code, and the files of the model class, which may belong to no package.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.models.discovery import config_nodes

T = TypeVar("T")


def cached(model: PreTrainedModel, suffix: str, kind: type[T], check: Callable[[], T]) -> T:
    """Return what ``check`` finds out about a model's class and config, from the file with this suffix if kept."""
    path = contract_path(type(model), model.config).with_suffix(suffix)
    found = kept(path, kind)
    if found is None:
        found = check()
        keep(path, found)
    return found


def contract_path(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Path:
    """Return the path of the cached contract of ``model_class`` with ``config``, below the user's cache folder."""
    name = f"{model_class.__module__}.{model_class.__qualname__}"
    config = copy.deepcopy(config)
    for node in config_nodes(config):
        node.dtype = None  # the tiny model is always fp32
    # A plugin's files have no version.
    found = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in model_class.__mro__}
    files = sorted(Path(file) for file in found if file is not None and Path(file).is_file())
    identity = [name, _digest(files), *_installed(), _code_digest(), config.to_json_string(use_diff=False)]
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "omnitrain" / "contracts" / f"{model_class.__name__}-{digest}.json"


@lru_cache(maxsize=1)
def _installed() -> tuple[str, ...]:
    """Names and versions of all packages, from the names of their metadata folders: reading these takes much longer."""
    folders = {Path(entry or ".") for entry in sys.path}
    return tuple(sorted({info.name for folder in folders for info in folder.glob("*-info")}))


@lru_cache(maxsize=1)
def _code_digest() -> str:
    return _digest(sorted(Path(__file__).parents[2].rglob("*.py")))


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def kept(path: Path, kind: type[T]) -> T | None:
    """Read a dataclass from the JSON at ``path``; None if the file is missing or invalid."""
    try:
        values = json.loads(path.read_bytes())
        is_whole = isinstance(values, dict) and values.keys() == TypeAdapter(kind).json_schema()["properties"].keys()
        return TypeAdapter(kind).validate_python(values) if is_whole else None
    except (OSError, ValueError):
        return None


def keep(path: Path, result: Any) -> None:
    """Write a dataclass to ``path`` as JSON; if the write fails, the next run checks again."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(asdict(result), indent=2))
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
