"""Check that a resumed run equals the uninterrupted run: the recipe keys and data that must not change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omnitrain.errors import UserError
from omnitrain.recipe import Recipe

# Keys (with all keys below them) that change neither the order of the data nor the math of an update; train.steps only
# moves the end of the run.
_MAY_CHANGE = (
    *("output_dir", "plugins", "evaluation", "parallel", "model.ops"),
    *("data.heldout", "data.workers", "data.cached_samples"),
    *("train.compile", "train.device", "train.precision", "train.cpu_threads", "train.steps"),
    *("train.log_every", "train.metrics", "train.callbacks", "train.trace", "train.track", "train.report"),
    *("train.save_every", "train.async_save", "train.keep_last", "train.keep_every", "train.keep_best"),
    *("train.early_stopping", "train.stop_seconds", "train.stall_seconds"),
)
_LORA_KEYS = re.compile(r"parallel\.(default|components\.[^.]+)\.lora\b")


def require_same_run(begun: Recipe, now: Recipe, folder: Path) -> None:
    """Raise a UserError with all keys that must not change and differ from the recipe with which the run was begun."""
    old, new = (dict(_leaves(recipe.model_dump())) for recipe in (begun, now))
    free = tuple(f"{key}." for key in _MAY_CHANGE)
    different = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    keys = [key for key in different if _LORA_KEYS.match(key) or not f"{key}.".startswith(free)]
    if keys:
        changes = [f"  {key}: was {_shown(old, key)}, is {_shown(new, key)}" for key in keys]
        raise UserError("\n".join([f"{folder} was started with another recipe:", *changes, _way_out(folder)]))


def require_same_rows(had: Sequence[int], have: Sequence[int], folder: Path) -> None:
    """Raise a UserError if the number of rows of a training data set changed, because their order would change."""
    pairs = enumerate(zip(had, have, strict=True))
    changes = [f"  data.train.{source}: had {old} rows, has {new}" for source, (old, new) in pairs if old != new]
    if changes:
        raise UserError("\n".join([f"{folder} was started with other data:", *changes, _way_out(folder)]))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, (dict, list)):
        yield path, value
        return
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(entry, f"{path}.{key}" if path else str(key))


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "unset"


def _way_out(folder: Path) -> str:
    return (
        f"resume it with its own recipe ({folder / 'recipe.yaml'}), or start a new run with another output_dir and "
        f"model.checkpoint={folder}, which starts from the weights of this run"
    )
