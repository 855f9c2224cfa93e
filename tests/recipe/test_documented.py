from pathlib import Path
from typing import Any, get_args

import pytest

from omnitrain.recipe.strict import Strict
from omnitrain.recipe.tree import Recipe

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


def nodes_of(annotation: Any) -> set[type[Strict]]:
    if not (isinstance(annotation, type) and issubclass(annotation, Strict)):
        return {node for argument in get_args(annotation) for node in nodes_of(argument)}
    fields = annotation.model_fields.values()
    return {annotation}.union(*(nodes_of(field.annotation) for field in fields))


NODES = sorted(nodes_of(Recipe), key=lambda node: node.__name__)


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
def test_every_key_stands_in_the_documentation_as_the_tree_describes_it(node: type[Strict]) -> None:
    missing = [
        name
        for name, field in node.model_fields.items()
        if not any(
            f"`{name}`" in line and (field.description or "").replace("|", "\\|") in line for line in PAGE.splitlines()
        )
    ]
    assert missing == []
