"""Idle keys: keys that are set although they can have no effect.

A key counts as set if its value differs from its default: a saved recipe contains every key and must load again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel


class Idle(NamedTuple):
    """A key that can have no effect: its dotted path from a node (numbers index lists), the reason, and what to do."""

    key: str
    why: str


class IdleValue(NamedTuple):
    """The value of an idle key that is set: names and indices from the node to it, itself, and the message."""

    path: tuple[str | int, ...]
    value: Any
    problem: str


def idle_values(node: BaseModel, idle: Iterable[Idle]) -> Iterator[IdleValue]:
    """Yield the ``idle`` keys of ``node`` that are set; keys below a node that is None are not set."""
    for key, why in idle:
        path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        value, default = _value_and_default(node, path)
        if value != default:
            has_nodes = any(isinstance(one, BaseModel) for one in (value if isinstance(value, list) else [value]))
            yield IdleValue(path, value, f"{'set' if has_nodes else f'found {value!r}'}, {why}")


def idle_problems(node: BaseModel, idle: Iterable[Idle], place: str = "") -> list[str]:
    """Return one line per idle key that is set; ``place`` is the key of ``node`` in the recipe."""
    values = idle_values(node, idle)
    return [f"{'.'.join(map(str, (*filter(None, [place]), *found.path)))}: {found.problem}" for found in values]


def _value_and_default(node: Any, path: tuple[str | int, ...]) -> tuple[Any, Any]:
    for part in path[:-1]:
        node = getattr(node, part) if isinstance(part, str) and isinstance(node, BaseModel) else node[part]
        if node is None:
            return None, None
    field = type(node).model_fields[str(path[-1])]
    return getattr(node, str(path[-1])), field.get_default(call_default_factory=True)
