from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from transformers import TrainingArguments

from omnitrain.recipe import Recipe, json_schema
from omnitrain.recipe.other_names import OF_TRAINERS, OTHER_NAMES, key_of, name_here


def description_of(key: str, schema: dict[str, Any]) -> str:
    """What the schema says about a key; raises for a key that no recipe has."""
    node = schema
    for part in key.partition("=")[0].split("."):
        branches = [node, *node.get("anyOf", []), *node.get("allOf", [])]
        names = [branch["$ref"].rpartition("/")[2] for branch in branches if "$ref" in branch]
        if part.isdigit():
            (node,) = [branch["items"] for branch in branches if "items" in branch]
            continue
        (node,) = [
            properties[part]
            for branch in [node, *(schema["$defs"][name] for name in names)]
            if part in (properties := branch.get("properties", {}))
        ]
    return str(node["description"])


def test_every_other_name_leads_to_a_key_of_a_recipe_or_says_why_there_is_none() -> None:
    schema = json_schema()
    for name, here in OTHER_NAMES.items():
        assert description_of(here.key, schema) if here.key else here.remark.startswith("remove it: "), name
        assert name_here(name, Recipe) is not None and name not in Recipe.model_fields
    assert len(OTHER_NAMES) == sum(map(len, OF_TRAINERS.values())) > 200  # each name stands once


def test_names_of_training_arguments_are_those_of_transformers() -> None:
    now = set(TrainingArguments.__dataclass_fields__)
    once = {"evaluation_strategy", "train_batch_size", "no_cuda", "group_by_length", "warmup_ratio"}
    once |= {"overwrite_output_dir"}
    of_scripts = {"train_file", "validation_file", "dataset_name", "tokenizer_name", "predict_with_generate"}
    assert set(OF_TRAINERS["HF Trainer"]) - once - of_scripts <= now


@pytest.mark.parametrize(
    ("name", "key"), [("steps", "train.steps"), ("pack_tokens", "data.pack_tokens"), ("path", None), ("nothing", None)]
)
def test_a_key_of_one_node_is_found_by_its_name(name: str, key: str | None) -> None:
    assert key_of(name, Recipe) == key


def test_a_tree_that_is_no_recipe_gets_no_advice_for_one() -> None:
    class Other(BaseModel):
        size: int

    assert name_here("max_steps", Other) is None
