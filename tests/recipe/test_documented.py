from pathlib import Path

import pytest
from pydantic import BaseModel

from omnitrain.recipe import parallel, tree

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
NODES = [
    node
    for node in {**vars(tree), **vars(parallel)}.values()
    if isinstance(node, type) and issubclass(node, tree.Strict) and node.model_fields
]


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
def test_every_key_stands_in_the_documentation_as_the_tree_describes_it(node: type[BaseModel]) -> None:
    missing = [
        name
        for name, field in node.model_fields.items()
        if not any(
            f"`{name}`" in line and (field.description or "").replace("|", "\\|") in line for line in PAGE.splitlines()
        )
    ]
    assert missing == []
