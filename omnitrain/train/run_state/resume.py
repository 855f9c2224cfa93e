"""A resumed run is the uninterrupted run: what may not change between its starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omnitrain.errors import UserError
from omnitrain.recipe import Recipe

# Keys (with all below them) that neither the order of the data nor the math of an update depends on, and the end of
# the run.
_MAY_CHANGE = (
    "output_dir",
    "plugins",
    "evaluation",
    "data.heldout",
    "data.workers",
    "data.cached_samples",
    "model.ops",
    "parallel",
    "train.compile",
    "train.steps",
    "train.device",
    "train.precision",
    "train.cpu_threads",
    "train.log_every",
    "train.save_every",
    "train.keep_checkpoints",
    "train.stop_seconds",
    "train.stall_seconds",
    "train.trace",
    "train.track",
)
_WHAT_TRAINS = re.compile(r"parallel\.(default|components\.[^.]+)\.lora\b")


def require_same_run(begun: Recipe, now: Recipe, folder: Path) -> None:
    """Refuse to continue a run with a recipe that would make another run of it.

    Args:
        begun: the recipe that the run was started with.
        now: the recipe to continue with.
        folder: of the run.

    Raises:
        UserError: every key that may not change and did, with both values.
    """
    was, is_ = (dict(_leaves(recipe.model_dump())) for recipe in (begun, now))
    keys = sorted(key for key in was.keys() | is_.keys() if was.get(key) != is_.get(key) and not _may_change(key))
    if keys:
        changes = [f"  {key}: was {_shown(was, key)}, is {_shown(is_, key)}" for key in keys]
        raise UserError("\n".join([f"{folder} was begun with another recipe:", *changes, _way_out(folder)]))


def require_same_rows(had: Sequence[int], have: Sequence[int], folder: Path) -> None:
    """Refuse to continue on data sets that grew or shrank: the order of their rows would be another.

    Args:
        had: rows of each training data set when the checkpoint was saved.
        have: rows of each now.
        folder: of the run.

    Raises:
        UserError: every data set with another number of rows.
    """
    pairs = enumerate(zip(had, have, strict=True))
    changes = [f"  data.train.{source}: had {old} rows, has {new}" for source, (old, new) in pairs if old != new]
    if changes:
        raise UserError("\n".join([f"{folder} was begun with other data:", *changes, _way_out(folder)]))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, (dict, list)):
        yield path, value
        return
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(entry, f"{path}.{key}" if path else str(key))


def _may_change(key: str) -> bool:
    return not _WHAT_TRAINS.match(key) and any(key == free or key.startswith(f"{free}.") for free in _MAY_CHANGE)


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "unset"


def _way_out(folder: Path) -> str:
    return (
        f"resume it with its own recipe ({folder / 'recipe.yaml'}), or start another run: a new output_dir, "
        f"and model.checkpoint={folder} to start from the weights of this one"
    )
