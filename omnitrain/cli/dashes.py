"""Options that are meant as overrides: ``--train.steps=20``, ``--max_steps 20``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_NO_DASHES = "keys of a recipe have no dashes"


def override_hint(option: str, arguments: Sequence[str]) -> str | None:
    """Return what to write for an option that a verb with a recipe does not have; None: it is no key of a recipe.

    Args:
        option: the option as the parser found it, such as ``--train.steps``.
        arguments: the arguments after the verb.
    """
    from omnitrain.recipe import Recipe
    from omnitrain.recipe.other_names import key_of, name_here
    from omnitrain.recipe.problems import nearest_key

    name = option.lstrip("-")
    if (advice := name_here(name.replace("-", "_"), Recipe)) is not None:
        return f"{option}: {advice}; keys of a recipe have no dashes: KEY=VALUE, such as train.steps=20"
    if "." not in name:
        key = key_of(name.replace("-", "_"), Recipe)
        return None if key is None else f"{option}: {_NO_DASHES}; write `{key}={_value(option, arguments)}`"
    key = nearest_key(name, Recipe)
    if key is None:
        return f"{option}: {_NO_DASHES}, and none is called `{name}`; `omnitrain schema` prints all"
    if key != name:
        return f"{option}: {_NO_DASHES}, and none is called `{name}`; did you mean `{key}={_value(option, arguments)}`?"
    return f"{option}: {_NO_DASHES}; write `{key}={_value(option, arguments)}`"


def _value(option: str, arguments: Sequence[str]) -> str:
    """Return the value after ``option=``, or the argument after ``option``."""
    for argument, after in pairwise([*arguments, "VALUE"]):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else after
    return "VALUE"
