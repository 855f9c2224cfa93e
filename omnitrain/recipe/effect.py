"""Keys that are set and can have no effect: one rule for all of them, whoever finds out that they cannot.

A key counts as set where its value is not its default: a saved recipe has every key, and must load again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel


class Idle(NamedTuple):
    """A key that can have no effect as the other keys, the model or the data are.

    Attributes:
        key: names and numbers from a node of the recipe to the value, joined by dots.
        why: what makes it idle, and what to do.
    """

    key: str
    why: str


class SetForNothing(NamedTuple):
    """An idle key that somebody has set.

    Attributes:
        path: names and numbers from the node to the value.
        value: that was found.
        problem: what was found, why it does nothing, and what to do.
    """

    path: tuple[str | int, ...]
    value: Any
    problem: str


def set_for_nothing(node: BaseModel, idle: Iterable[Idle]) -> Iterator[SetForNothing]:
    """Those of the ``idle`` keys of ``node`` that are set; keys of nodes that are None are not."""
    for key, why in idle:
        path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        value, default = _value_and_default(node, path)
        if value != default:
            found = "set" if isinstance(value, BaseModel) else f"found {value!r}"
            yield SetForNothing(path, value, f"{found}, {why}")


def idle_problems(node: BaseModel, idle: Iterable[Idle], place: str = "") -> list[str]:
    """The same as lines, each with its key; ``place``: the key of ``node``."""
    found = set_for_nothing(node, idle)
    return [f"{'.'.join(map(str, (*filter(None, [place]), *one.path)))}: {one.problem}" for one in found]


def _value_and_default(node: Any, path: tuple[str | int, ...]) -> tuple[Any, Any]:
    for part in path[:-1]:
        node = getattr(node, part) if isinstance(part, str) and isinstance(node, BaseModel) else node[part]
        if node is None:
            return None, None
    field = type(node).model_fields[str(path[-1])]
    return getattr(node, str(path[-1])), field.get_default(call_default_factory=True)
