"""docs/recipes.md has each key of a recipe as the tree describes it."""

from __future__ import annotations

from omnitrain.recipe.strict import descriptions
from tests.recipe.recipes_page import NODES, PAGE, TABLE, heading_of, with_tables


def test_the_tables_of_the_page_are_those_of_the_tree() -> None:
    page = PAGE.read_text()
    assert {heading_of(node) for node in NODES} == {found[1] for found in TABLE.finditer(page)}
    assert with_tables(page) == page, "run python -m tests.recipe.recipes_page"


def test_every_key_has_a_description() -> None:
    assert {node: descriptions(node).keys() for node in NODES} == {node: node.model_fields.keys() for node in NODES}
