"""Contracts on disk: a class and config are checked once per version of what they run on.

That is every installed package (an optional kernel that comes or goes changes what a layer does), omnitrain's own code,
and the file of a class that belongs to no package.
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
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.models.discovery import config_nodes

Found = TypeVar("Found")


def contract_path(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Path:
    """Where the contract of ``model_class`` on ``config`` is kept, below the user's cache folder."""
    name = f"{model_class.__module__}.{model_class.__qualname__}"
    config = copy.deepcopy(config)
    for node in config_nodes(config):
        node.dtype = None  # the twin is fp32 in any case
    identity = [name, _code_beside(model_class), *_installed(), _own_code(), config.to_json_string(use_diff=False)]
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "omnitrain" / "contracts" / f"{model_class.__name__}-{digest}.json"


@lru_cache(maxsize=1)
def _installed() -> tuple[str, ...]:
    return tuple(sorted(f"{package.name}=={package.version}" for package in distributions()))


def _code_beside(model_class: type[PreTrainedModel]) -> str:
    """Of the files of all classes that it derives from; those of a plugin have no version."""
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in model_class.__mro__}
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file is not None and Path(file).is_file()):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _own_code() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kept(path: Path, read: Callable[[dict[str, Any]], Found]) -> Found | None:
    """What ``read`` makes of the JSON at ``path``; None when there is none that can be read."""
    try:
        return read(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def keep(path: Path, found: Any) -> None:
    """Keep a dataclass at ``path`` as JSON; where that cannot be written to, the next run checks again."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(asdict(found), indent=2))
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
