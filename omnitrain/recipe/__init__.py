"""Recipes: what a user writes, as one typed tree with YAML, overrides and Python as its spellings."""

from omnitrain.recipe.load import json_schema, load_recipe, save_recipe
from omnitrain.recipe.shipped import copy_recipe, find_recipe, list_recipes, recipes_folder, summary
from omnitrain.recipe.tree import (
    ChatFormat,
    Columns,
    Compile,
    Data,
    DataSource,
    Decoder,
    Encoder,
    Evaluation,
    HFSource,
    Model,
    Ops,
    Optimizer,
    Projector,
    Recipe,
    Sampling,
    Train,
)

__all__ = [
    "ChatFormat",
    "Columns",
    "Compile",
    "Data",
    "DataSource",
    "Decoder",
    "Encoder",
    "Evaluation",
    "HFSource",
    "Model",
    "Ops",
    "Optimizer",
    "Projector",
    "Recipe",
    "Sampling",
    "Train",
    "copy_recipe",
    "find_recipe",
    "json_schema",
    "list_recipes",
    "load_recipe",
    "recipes_folder",
    "save_recipe",
    "summary",
]
