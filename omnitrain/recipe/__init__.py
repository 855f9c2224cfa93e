"""Recipes: one typed configuration tree, written as YAML, as overrides, or in Python."""

from omnitrain.recipe.data import ChatFormat, Columns, Data, DataSource
from omnitrain.recipe.evaluation import Evaluation, Sampling
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.model import Decoder, Encoder, HFSource, Model, Ops, Projector
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan, Precision
from omnitrain.recipe.save import json_schema, save_recipe
from omnitrain.recipe.shipped import copy_recipe, find_recipe, list_recipes, recipes_folder, summary
from omnitrain.recipe.train import Compile, ExpertsBalance, Optimizer, Train
from omnitrain.recipe.tree import Recipe

__all__ = [
    "ChatFormat",
    "Columns",
    "Compile",
    "ComponentPlan",
    "Data",
    "DataSource",
    "Decoder",
    "Encoder",
    "Evaluation",
    "ExpertsBalance",
    "HFSource",
    "Layout",
    "Model",
    "Ops",
    "Optimizer",
    "ParallelPlan",
    "Precision",
    "Projector",
    "Recipe",
    "Sampling",
    "Train",
    "copy_recipe",
    "find_recipe",
    "json_schema",
    "list_recipes",
    "parse_layout",
    "recipes_folder",
    "save_recipe",
    "summary",
]
