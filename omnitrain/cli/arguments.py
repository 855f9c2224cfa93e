"""Arguments that several verbs take."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE]...", help="Overrides, such as train.steps=20.")
]
