"""A typo in a recipe never does nothing: every key of every shipped recipe, misspelt, is refused by its full path."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omnitrain.errors import RecipeError
from omnitrain.recipe import Recipe, list_recipes
from omnitrain.recipe.yaml_text import dump_yaml, parse_yaml

Key = tuple[str | int, ...]

# The keys in these are names that the user makes up, or that only a folder knows: a processor's arguments, components
# inside of a model.
FREE_NAMES = (
    "model.encoders",
    "model.decoders",
    "data.processor_arguments.images_kwargs",
    "parallel.components",
    "train.optimizer.learning_rates",
)
SHIPPED = list_recipes()


def test_every_misspelt_key_of_a_full_recipe_is_refused(recipe_file: Path) -> None:
    resolved = Recipe.load(recipe_file).model_dump()
    assert misspell_each_key(parse_yaml(recipe_file.read_text(), ""), recipe_file.with_name("text.yaml")) > 30
    assert misspell_each_key(resolved, recipe_file.with_name("resolved.yaml")) > 100


@pytest.mark.parametrize("name", SHIPPED)
def test_every_misspelt_key_of_a_shipped_recipe_is_refused(name: str, tmp_path: Path) -> None:
    assert misspell_each_key(parse_yaml(SHIPPED[name].read_text(), ""), tmp_path / "misspelt.yaml") > 10


def misspell_each_key(tree: Any, scratch: Path) -> int:
    """Misspell the keys of a recipe's tree, one at a time, in the file ``scratch``; returns how many."""
    cases = list(keys(tree))
    for key in cases:
        scratch.write_text(dump_yaml(misspelt(tree, key)))
        with pytest.raises(RecipeError) as refusal:
            Recipe.load(scratch)
        path = ".".join(map(str, (*key[:-1], misspell(str(key[-1])))))
        lines = [line for line in str(refusal.value).splitlines() if line.startswith(f"  {path}: ")]
        expected = "missing" if key[-1] == "model_type" and not lines else f"did you mean `{key[-1]}`?"
        assert expected in (lines[0] if lines else str(refusal.value)), str(refusal.value)
    return len(cases)


def keys(node: Any, above: Key = ()) -> Iterator[Key]:
    if isinstance(node, dict):
        for name, child in node.items():
            if ".".join(map(str, above)) not in FREE_NAMES:
                yield (*above, name)
            yield from keys(child, (*above, name))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from keys(child, (*above, index))


def misspelt(tree: Any, key: Key) -> Any:
    tree = copy.deepcopy(tree)
    node = tree
    for part in key[:-1]:
        node = node[part]
    node[misspell(str(key[-1]))] = node.pop(key[-1])
    return tree


def misspell(word: str) -> str:
    """Double the letter in the middle."""
    middle = len(word) // 2
    return word[: middle + 1] + word[middle:]
