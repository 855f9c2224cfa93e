"""Save a recipe as YAML, make its JSON schema, and check names that only the model knows."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omnitrain.errors import RecipeError
from omnitrain.recipe.tree import Recipe
from omnitrain.recipe.yaml_text import dump_yaml


def require_heads(recipe: Recipe, decoders: Iterable[str]) -> None:
    """Raise a RecipeError for heads that the recipe names and a model that was loaded does not have."""
    if unknown := [f"{'.'.join(map(str, path))}: {why}" for path, why in recipe.unknown_heads(decoders)]:
        raise RecipeError(*unknown)


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write a resolved recipe as YAML with all fields, atomically; the file loads to an equal recipe."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(dump_yaml(recipe.model_dump()), encoding="utf-8")
    os.replace(temporary, file)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe (draft 2020-12), for completion and checks in editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
