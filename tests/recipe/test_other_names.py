from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from transformers import TrainingArguments

from omnitrain.recipe import Recipe, json_schema
from omnitrain.recipe.other_names import OTHER_NAMES, key_of, name_here

OF_OTHER_LIBRARIES = {
    *("epochs", "batch_size", "train_batch_size", "lr", "evaluation_strategy", "no_cuda", "tp_size", "train_file"),
    *("dataset_name", "max_length", "max_seq_length", "cutoff_len", "model_name_or_path", "attn_implementation"),
    *("lora_r", "lora_rank", "lora_alpha", "lora_target_modules", "save_strategy", "warmup_ratio", "r", "dora"),
    *("lora_target", "target_modules", "lora_dropout", "use_rslora", "use_dora", "finetuning_type"),
}


def description_of(key: str, schema: dict[str, Any]) -> str:
    """What the schema says about a key; raises for a key that no recipe has."""
    node = schema
    for part in key.partition("=")[0].split("."):
        branches = [node, *node.get("anyOf", []), *node.get("allOf", [])]
        names = [branch["$ref"].rpartition("/")[2] for branch in branches if "$ref" in branch]
        (node,) = [
            properties[part]
            for branch in [node, *(schema["$defs"][name] for name in names)]
            if part in (properties := branch.get("properties", {}))
        ]
    return str(node["description"])


def test_every_other_name_leads_to_a_key_of_a_recipe() -> None:
    schema = json_schema()
    for name, (key, _) in OTHER_NAMES.items():
        assert description_of(key, schema), name
        assert name_here(name, Recipe) is not None and name not in Recipe.model_fields


def test_names_of_training_arguments_are_those_of_transformers() -> None:
    assert set(OTHER_NAMES) - set(TrainingArguments.__dataclass_fields__) <= OF_OTHER_LIBRARIES


@pytest.mark.parametrize(
    ("name", "key"), [("steps", "train.steps"), ("pack_tokens", "data.pack_tokens"), ("path", None), ("nothing", None)]
)
def test_a_key_of_one_node_is_found_by_its_name(name: str, key: str | None) -> None:
    assert key_of(name, Recipe) == key


def test_a_tree_that_is_no_recipe_gets_no_advice_for_one() -> None:
    class Other(BaseModel):
        size: int

    assert name_here("max_steps", Other) is None


@pytest.mark.parametrize(("name", "said"), [("r", "use `rank`"), ("use_dora", "there is no DoRA"), ("dora", "no DoRA")])
def test_names_of_peft_inside_the_node_are_told_by_the_key_beside_them(name: str, said: str) -> None:
    advice = name_here(name, Recipe, ["rank", "targets"])
    assert advice is not None and said in advice
