"""Recipes in and out: YAML and overrides to the typed tree, the tree to YAML, the tree's JSON schema."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from omnitrain.errors import RecipeError
from omnitrain.recipe.overrides import apply_overrides
from omnitrain.recipe.problems import problem_lines
from omnitrain.recipe.shipped import find_recipe
from omnitrain.recipe.tree import Recipe
from omnitrain.recipe.yaml_text import dump_yaml, parse_yaml


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a YAML recipe.

    Args:
        path: YAML file, or the bare name of a shipped recipe.
        overrides: ``key.sub=value`` strings, applied in order; values are YAML.

    Raises:
        RecipeError: no such recipe, YAML that cannot be read, or every problem of the tree and the overrides at once.
    """
    if not isinstance(overrides, list | tuple | None):
        raise RecipeError(
            f"overrides: found a {type(overrides).__name__}; expected a list of key.sub=value, such as "
            "['train.steps=20']"
        )
    file = find_recipe(path)
    tree = _read_mapping(file)
    problems = apply_overrides(tree, overrides or [])
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        problems += problem_lines(error, Recipe)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise RecipeError("\n  ".join([f"{file}: {count}", *problems]))
    return recipe


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


def _read_mapping(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    tree = parse_yaml(text, str(file))
    if not isinstance(tree, dict):
        found = "an empty file" if tree is None else f"a {type(tree).__name__}"
        raise RecipeError(f"{file}: found {found}; expected keys such as `model:`, `data:` and `train:`")
    return tree
