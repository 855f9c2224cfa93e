"""A typo in a recipe never does nothing: every key of every shipped recipe, misspelt, is refused by its full path."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omnitrain.errors import RecipeError
from omnitrain.recipe import Recipe, list_recipes
from omnitrain.recipe.yaml_text import parse_yaml

Key = tuple[str | int, ...]

# The keys in these are names that the user makes up, or that only a folder knows: a processor's arguments, components
# inside of a model.
FREE_NAMES = (
    "model.encoders",
    "model.decoders",
    "model.teachers",
    "data.pack_elements",
    "data.processor_arguments.images_kwargs",
    "parallel.components",
    "parallel.sections",
    "train.metrics",
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
    """Misspell every key of a recipe's tree in the file ``scratch``; returns how many there are.

    Those of one depth are misspelt together. One that the refusal leaves out, as others came first, is misspelt alone.
    """
    cases = list(keys(tree))
    refusals = {
        depth: refusal(tree, [key for key in cases if len(key) == depth], scratch) for depth in set(map(len, cases))
    }
    for key in cases:
        together = line_of(key, refusals[len(key)])
        if f"did you mean `{key[-1]}`?" not in together:
            alone = refusal(tree, [key], scratch)
            line = line_of(key, alone)
            expected = "missing" if key[-1] == "model_type" and not line else f"did you mean `{key[-1]}`?"
            assert expected in (line or alone), alone
    return len(cases)


def refusal(tree: Any, misspelt_keys: list[Key], scratch: Path) -> str:
    scratch.write_text(json.dumps(misspelt(tree, misspelt_keys)))
    with pytest.raises(RecipeError) as refused:
        Recipe.load(scratch)
    return str(refused.value)


def line_of(key: Key, text: str) -> str:
    """The line about a misspelt key, or nothing."""
    path = ".".join(map(str, (*key[:-1], misspell(str(key[-1])))))
    return next((line for line in text.splitlines() if line.startswith(f"  {path}: ")), "")


def keys(node: Any, above: Key = ()) -> Iterator[Key]:
    if isinstance(node, dict):
        for name, child in node.items():
            if ".".join(map(str, above)) not in FREE_NAMES:
                yield (*above, name)
            yield from keys(child, (*above, name))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from keys(child, (*above, index))


def misspelt(tree: Any, together: list[Key]) -> Any:
    tree = copy.deepcopy(tree)
    for key in together:
        node = tree
        for part in key[:-1]:
            node = node[part]
        node[misspell(str(key[-1]))] = node.pop(key[-1])
    return tree


def misspell(word: str) -> str:
    """Double the letter in the middle."""
    middle = len(word) // 2
    return word[: middle + 1] + word[middle:]
