"""Idle keys: keys that are set although they can have no effect.

A key counts as set if its value differs from its default: a saved recipe contains every key and must load again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from omnitrain.recipe.located_problem import Problem


class Idle(NamedTuple):
    """A key that can have no effect: its dotted path from a node (numbers index lists), the reason, and what to do."""

    key: str
    why: str


def idle_values(node: BaseModel, idle: Iterable[Idle]) -> Iterator[Problem]:
    """Yield the path and the problem of the ``idle`` keys of ``node`` that are set; no key below None is set."""
    for key, why in idle:
        path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        value, default = _value_and_default(node, path)
        if value != default:
            has_nodes = any(isinstance(one, BaseModel) for one in (value if isinstance(value, list) else [value]))
            yield path, f"{'set' if has_nodes else f'found {value!r}'}, {why}"


def idle_problems(node: BaseModel, idle: Iterable[Idle], place: str = "") -> list[str]:
    """Return one line per idle key that is set; ``place`` is the key of ``node`` in the recipe."""
    found = idle_values(node, idle)
    return [f"{'.'.join(map(str, (*filter(None, [place]), *path)))}: {problem}" for path, problem in found]


def _value_and_default(node: Any, path: tuple[str | int, ...]) -> tuple[Any, Any]:
    for part in path[:-1]:
        node = getattr(node, part) if isinstance(part, str) and isinstance(node, BaseModel) else node[part]
        if node is None:
            return None, None
    field = type(node).model_fields[str(path[-1])]
    return getattr(node, str(path[-1])), field.get_default(call_default_factory=True)
