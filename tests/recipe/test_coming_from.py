"""docs/coming-from.md says what the code says: each key of each trainer, and an example that loads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from omnitrain.recipe import Recipe
from omnitrain.recipe.other_names import OTHER_NAMES, name_here
from tests.recipe.coming_from import PAGE, names_of, trainers, with_tables

TEXT = PAGE.read_text()


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    assert with_tables(TEXT) == TEXT
    assert [f"\n## {trainer}\n" in TEXT for trainer in trainers()] == [True] * 7
    assert {name for trainer in trainers() for name in names_of(trainer)} == OTHER_NAMES.keys()


@pytest.mark.parametrize("trainer", trainers())
def test_an_error_answers_each_key_of_the_page_as_the_page_does(trainer: str) -> None:
    section = TEXT.split(f"\n## {trainer}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\S+)`|none) \| (.*) \|$", section, re.MULTILINE)
    assert [name for name, *_ in rows] == [*names_of(trainer)]
    for name, key, remark in rows:
        advice = name_here(name, Recipe)
        assert advice is not None and (f"use `{key}`" in advice if key else advice == f"remove it: {remark}"), name


def paths_of(node: Any, path: str = "") -> set[str]:
    inner = node.items() if isinstance(node, dict) else ()
    return {path}.union(*(paths_of(value, f"{path}.{key}".removeprefix(".")) for key, value in inner))


def test_the_example_has_each_key_of_the_other_file(tmp_path: Path) -> None:
    theirs, ours = re.findall(r"^```(?:text|yaml)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    (tmp_path / "recipe.yaml").write_text(ours)
    assert Recipe.load(tmp_path / "recipe.yaml").parallel.of("foundation").lora is not None
    given = yaml.safe_load(theirs).keys() - {"output_dir"}
    implied = {"template", "gradient_accumulation_steps"}  # the model's own template; part of samples_per_step
    set_here = {path.replace("components.foundation", "default") for path in paths_of(yaml.safe_load(ours))}
    assert {name for name in given if OTHER_NAMES[name].key.partition("=")[0] not in set_here} == implied
