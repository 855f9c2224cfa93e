"""What is made of a recipe: its YAML, its JSON schema, and the check of names that only the model knows."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from omnitrain.errors import RecipeError
from omnitrain.recipe.problems import problem_lines
from omnitrain.recipe.tree import Recipe
from omnitrain.recipe.yaml_text import dump_yaml


def require_heads(recipe: Recipe, decoders: Iterable[str]) -> None:
    """The check that a recipe over a checkpoint can only get once the model is known (:meth:`Recipe.check_heads`).

    Raises:
        RecipeError: names every head that the model does not have.
    """
    try:
        recipe.check_heads(decoders)
    except ValidationError as error:
        raise RecipeError("\n".join(problem_lines(error, Recipe))) from None


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write a recipe as YAML, complete and resolved: every field, defaults too. It loads to an equal recipe.

    Folders are made as needed; the file appears whole or not at all.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.tmp")
    unfinished.write_text(dump_yaml(recipe.model_dump()), encoding="utf-8")
    os.replace(unfinished, file)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe (draft 2020-12), for completion and checks in editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
