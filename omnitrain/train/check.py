"""``omnitrain check``: a recipe built on the meta device, in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.utils import logging as hf_logging

from omnitrain.data.processor import OmniProcessor
from omnitrain.data.rows import RowSource
from omnitrain.data.sample import Rejected
from omnitrain.errors import UserError
from omnitrain.models.table import component_rows
from omnitrain.recipe import DataSource, Recipe
from omnitrain.train.display import console, show_components
from omnitrain.train.evaluate import load_scorer
from omnitrain.train.setup import build_from_recipe


def check_recipe(recipe: Recipe) -> list[str]:
    """Build the model without weights, open the data, prepare one row of every source; print what was found.

    Returns:
        Every problem, one message each; empty when the recipe would run.
    """
    hf_logging.set_verbosity_error()
    problems: list[str] = []

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except UserError as error:
            problems.append(str(error))
            return None

    built = attempt(lambda: build_from_recipe(recipe, init_device="meta"))
    if built:
        show_components(component_rows(built[0]))
    for source in [*recipe.data.train, *recipe.data.heldout]:
        rows = attempt(lambda source=source: RowSource(source))  # type: ignore[misc]
        if rows is not None and built:
            problems += _check_rows(rows, source, built[1], recipe.data.pack_tokens)
    if recipe.evaluation is not None:
        attempt(lambda: load_scorer(recipe.evaluation.scorer if recipe.evaluation else None))
    return problems


def _check_rows(rows: RowSource, source: DataSource, processor: OmniProcessor, pack_tokens: int) -> list[str]:
    problems = []
    for name, positions in rows.by_source().items():
        try:
            sample = processor.sample(rows[positions[0]], 0, pack_tokens)
        except UserError as error:
            problems.append(str(error))
            continue
        if isinstance(sample, Rejected):
            problems.append(f"{source.path}: row {sample.id!r}: {sample.reason}")
        else:
            trained = int(sample.loss_mask.sum()) + sum(s.item.num_tokens for s in sample.spans if s.is_target)
            console.print(f"{name}: {len(positions):,} rows; the first: {len(sample)} tokens, {trained} trained")
    return problems
