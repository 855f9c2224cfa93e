"""Contracts on disk: a class and config are checked once per version of what they run on, omnitrain's code included."""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

import omnitrain
from omnitrain.models.contract.findings import Contract


def contract_path(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Path:
    """Where the contract of ``model_class`` on ``config`` is kept, below the user's cache folder."""
    versions = [version(package) for package in ("transformers", "torch")]
    name = f"{model_class.__module__}.{model_class.__qualname__}"
    identity = [name, *versions, _own_code(), config.to_json_string(use_diff=False)]
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "omnitrain" / "contracts" / f"{model_class.__name__}-{digest}.json"


@lru_cache(maxsize=1)
def _own_code() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(omnitrain.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_contract(path: Path) -> Contract | None:
    """The contract kept at ``path``; None when there is none that can be read."""
    try:
        return Contract.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_contract(path: Path, contract: Contract) -> None:
    """Keep ``contract``; where the cache cannot be written to, the next run checks again."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(contract.to_json(), indent=2))
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
