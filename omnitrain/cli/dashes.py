"""Options that are meant as overrides: ``--train.steps=20``, ``--max_steps 20``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def override_hint(option: str, arguments: Sequence[str]) -> str | None:
    """Return what to write for an option that a verb with a recipe does not have; None: it is no key of a recipe.

    Args:
        option: the option as the parser found it, such as ``--train.steps``.
        arguments: the arguments after the verb.
    """
    from omnitrain.recipe import Recipe
    from omnitrain.recipe.other_names import key_of, name_here

    name = option.lstrip("-")
    advice = name_here(name.replace("-", "_"), Recipe)
    key = name if "." in name else key_of(name.replace("-", "_"), Recipe)
    if advice is None and key is None:
        return None
    if advice is not None:
        return f"{option}: {advice}; keys of a recipe have no dashes: KEY=VALUE, such as train.steps=20"
    return f"{option}: keys of a recipe have no dashes; write `{key}={_value(option, arguments)}`"


def _value(option: str, arguments: Sequence[str]) -> str:
    """Return the value after ``option=``, or the argument after ``option``."""
    for argument, after in pairwise([*arguments, "VALUE"]):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else after
    return "VALUE"
