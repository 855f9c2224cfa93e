"""Globs over parameter names, such as ``layers.*.mlp.experts.*``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from omnitrain.recipe.suggest import hint, nearest


def matches(glob: str, name: str) -> bool:
    """Return whether ``glob`` matches the dotted ``name`` from its beginning or any dot on, to its end.

    ``*`` matches characters other than a dot, ``**`` any characters.
    """
    parts = ("[^.]*" if part == "*" else ".*" if part == "**" else re.escape(part) for part in re.split(r"(\*+)", glob))
    return re.fullmatch(rf"(?:.*\.)?{''.join(parts)}", name) is not None


def matches_weight(glob: str, name: str) -> bool:
    """Return whether ``glob`` matches the weight ``name`` of experts, or what is fused in it or in the model's files.

    ``experts.gate_proj`` and ``experts.*.gate_proj.weight`` match ``experts.gate_up_proj``, as of transformers.
    """
    experts, _, last = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    names = (name, *(f"{experts}.{part}" for part in parts), *(f"{experts}.0.{part}.weight" for part in parts))
    return any(matches(glob, one) for one in names)


def unmatched(glob: str, names: Iterable[str]) -> str:
    """Return the problem of a glob that matches none of ``names``, with the nearest glob that would match."""
    patterns = set(map(any_layer, names))
    tails = {pattern.split(".", cut)[-1] for pattern in patterns for cut in range(pattern.count(".") + 1)}
    close = nearest(glob, tails)
    return f"`{glob}` matches no name; {f'did you mean `{close}`?' if close else hint(glob, sorted(patterns)[:8])}"


def any_layer(name: str) -> str:
    """Replace the indices of module lists in a name by ``*``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
