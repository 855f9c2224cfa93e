"""Globs over parameter names, such as ``layers.*.mlp.experts.*``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from omnitrain.errors import UserError
from omnitrain.recipe.suggest import hint, nearest

Value = TypeVar("Value")


def match_globs(globs: Iterable[str], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Glob -> the names that it matches.

    ``*`` stands for characters without a dot, ``**`` for any. A glob may begin at any dot of a name, so that
    ``layers.*.mlp`` finds ``model.language_model.layers.0.mlp``; it must reach to the name's end.

    Args:
        globs: patterns.
        names: dotted names, relative to the component.

    Raises:
        UserError: every glob that matches nothing, each with the nearest one that would.
    """
    known = list(names)
    found = {glob: tuple(name for name in known if matches(glob, name)) for glob in globs}
    problems = [unmatched(glob, known) for glob, matched in found.items() if not matched]
    if problems:
        raise UserError("\n".join(problems))
    return found


def assign_globs(plan: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    """Name -> the value of the glob that matches it.

    Raises:
        UserError: a glob that matches nothing, or a name that two globs give different values.
    """
    assigned: dict[str, tuple[str, Value]] = {}
    problems = []
    for glob, matched in match_globs(plan, names).items():
        for name in matched:
            other, value = assigned.setdefault(name, (glob, plan[glob]))
            if value != plan[glob]:
                problems.append(f"{name}: `{other}` says {value!r}, `{glob}` says {plan[glob]!r}; make them disjoint")
    if problems:
        raise UserError("\n".join(problems))
    return {name: value for name, (_, value) in assigned.items()}


def matches(glob: str, name: str) -> bool:
    """Whether ``glob`` matches ``name`` from its beginning, or from behind one of its dots, to its end."""
    parts = ("[^.]*" if part == "*" else ".*" if part == "**" else re.escape(part) for part in re.split(r"(\*+)", glob))
    return re.fullmatch(rf"(?:.*\.)?{''.join(parts)}", name) is not None


def unmatched(glob: str, names: Iterable[str]) -> str:
    """What to tell about a glob that matches nothing."""
    patterns = set(map(any_layer, names))
    tails = {pattern.split(".", cut)[-1] for pattern in patterns for cut in range(pattern.count(".") + 1)}
    close = nearest(glob, tails)
    return f"`{glob}` matches no name; {f'did you mean `{close}`?' if close else hint(glob, sorted(patterns)[:8])}"


def any_layer(name: str) -> str:
    """The name of a module or parameter with ``*`` for its place in module lists."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
