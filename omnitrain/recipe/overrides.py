"""``key.sub=value`` overrides of a recipe, before validation."""

from __future__ import annotations

from typing import Any

from omnitrain.errors import RecipeError
from omnitrain.recipe.yaml_text import parse_yaml


def apply_overrides(tree: dict[str, Any], overrides: list[str]) -> list[str]:
    """Set ``key.sub=value`` (YAML) in ``tree``, in order; return a line for each that cannot be applied."""
    problems = []
    for override in overrides:
        try:
            _apply(tree, override)
        except RecipeError as error:
            problems.append(str(error))
    return problems


def _apply(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    path = dotted.strip().split(".")
    if not equals or not all(path):
        raise RecipeError(f"override `{override}`: expected key.sub=value, such as train.steps=20")
    value = parse_yaml(text, f"override `{override}`")
    node: Any = tree
    for depth, part in enumerate(path[:-1]):
        node = _child(node, _key(node, part, path[:depth]), path[depth + 1])
    node[_key(node, path[-1], path[:-1])] = value


def _child(node: Any, key: str | int, next_part: str) -> Any:
    child = node.get(key) if isinstance(node, dict) else node[key]
    if child is not None:
        return child
    if next_part.isdigit():
        return []  # without a list, any index is refused
    node[key] = {}
    return node[key]


def _key(node: Any, part: str, parents: list[str]) -> str | int:
    if isinstance(node, dict):
        return part
    dotted = ".".join(parents)
    if not isinstance(node, list):
        raise RecipeError(f"{dotted}.{part}: `{dotted}` is {node!r}, which has no keys; set `{dotted}` as a whole")
    if part.isdigit() and int(part) < len(node):
        return int(part)
    indexes = f"an index from 0 to {len(node) - 1}" if node else "no index, the list is empty"
    raise RecipeError(f"{dotted}.{part}: found `{part}`; expected {indexes}; or set `{dotted}` as a whole")
