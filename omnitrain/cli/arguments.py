"""Arguments that several verbs take, and options that are meant as overrides: ``--train.steps=20``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from omnitrain.errors import UserError

_NO_DASHES = "keys of a recipe have no dashes"


def override_hint(option: str, arguments: Sequence[str], is_near_option: bool = False) -> str | None:
    """Return what to write for an option as the parser found it, such as ``--train.steps``; None: it is no key."""
    from omnitrain.recipe import Recipe
    from omnitrain.recipe.other_names import key_near, key_of, name_here
    from omnitrain.recipe.problems import nearest_key

    name = option.lstrip("-")
    near = nearest_key(name, Recipe) if "." in name else None
    theirs = None if near is not None else name_here(name.rpartition(".")[2].replace("-", "_"), Recipe)
    if theirs is not None:
        return f"{option}: {theirs}; {_NO_DASHES}: KEY=VALUE, such as train.steps=20"
    if "." in name:
        exact = None
    else:
        exact = key_of(name.replace("-", "_"), Recipe)
        near = None if is_near_option else key_near(name.replace("-", "_"), Recipe)
    if exact is not None or near == name:
        return f"{option}: {_NO_DASHES}; write `{exact or near}={_value(option, arguments)}`"
    if near is None and "." not in name:
        return None
    advice = f"did you mean `{near}={_value(option, arguments)}`?" if near else "`omnitrain show --schema` prints all"
    return f"{option}: {_NO_DASHES}, and none is called `{name}`; {advice}"


def _value(option: str, arguments: Sequence[str]) -> str:
    """Return the value after ``option=``, or the argument after ``option``."""
    for argument, after in pairwise([*arguments, "VALUE"]):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else after
    return "VALUE"


def require_writable(option: str, file: Path | None) -> None:
    """Raise UserError if a file that ``option`` names cannot be written."""
    if file is None:
        return
    place = file if file.exists() else file.parent
    if not os.access(place, os.W_OK) or not (file.is_file() or place.is_dir()):
        raise UserError(f"{option} {file}: {place} is not a writable {'file' if file.exists() else 'folder'}")


RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE]...", help="Overrides, such as train.steps=20.")
]
