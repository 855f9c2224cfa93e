from pathlib import Path
from typing import Any, get_args

import pytest

from omnitrain.recipe.strict import Strict, descriptions
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
        for name, description in descriptions(node).items()
        if not any(f"`{name}`" in line and description.replace("|", "\\|") in line for line in PAGE.splitlines())
    ]
    assert missing == [] and descriptions(node).keys() == node.model_fields.keys()
