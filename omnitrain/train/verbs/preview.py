"""``omnitrain show --packs``: the first packs of a recipe, as the model gets them; ``--stats``: numbers of its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omnitrain.data.loading.loader import StepLoader
from omnitrain.data.loading.measure import Measured, Packing, measure, pack_measures
from omnitrain.data.packing.budget import PackBudget
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Rejected
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.unread import unread_notes
from omnitrain.data.sources.rows import Row, RowSource, open_sources
from omnitrain.errors import UserError
from omnitrain.models.components.contract import Contract
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe import Recipe
from omnitrain.report.data.pack_view import view_pack, view_rejected
from omnitrain.report.data.preview import DataPreview
from omnitrain.report.data.stats import DataStats
from omnitrain.train.build_from_recipe import build_from_recipe
from omnitrain.train.epochs import in_steps, loader_of
from omnitrain.train.metrics.console import console
from omnitrain.train.metrics.display import quiet_libraries
from omnitrain.train.metrics.progress import Activity


def preview(recipe: Recipe | str | Path, overrides: Sequence[str] = (), *, packs: int = 2) -> DataPreview:
    """Return the first packs of a recipe's run, and the rows that were rejected while they were made.

    The result prints as text, is shown as HTML in a notebook, and writes a page with ``save``. No weights are read.
    ``recipe`` is one, or a file or name, with ``overrides`` such as ``data.pack_tokens=512``. Raises UserError: the
    recipe, its model or its data cannot be used.
    """
    if packs < 1:
        raise UserError(f"packs: found {packs}; expected a number above 0")
    resolved, name = recipe_and_name(recipe, overrides)
    model, processor = model_without_weights(resolved)
    loader = loader_of(resolved, model, processor, resolved.train.packs_per_step)
    drawn: list[Pack] = []
    for step in loader:
        drawn += step
        if len(drawn) >= packs:
            break
    views = [
        view_pack(pack, [_row(loader, index) for index in pack.info.indices], processor, resolved.data.pack_tokens)
        for pack in drawn[:packs]
    ]
    rejected = [view_rejected(one, _row(loader, one.index)) for one in loader.rejected.values()]
    unread = unread_notes(loader.sources, processor.renderer, resolved)
    return DataPreview(name, tuple(views), tuple(rejected), processor.frames_of, tuple(unread))


def recipe_and_name(recipe: Recipe | str | Path, overrides: Sequence[str]) -> tuple[Recipe, str]:
    """Return a recipe in steps and packs, and its name; UserError: mistakes, or overrides of a loaded one."""
    if not isinstance(recipe, Recipe):
        return in_steps(Recipe.load(recipe, list(overrides))), Path(recipe).stem
    if overrides:
        raise UserError("overrides change a recipe while it is loaded; give them to Recipe.load")
    return in_steps(recipe), Path(recipe.output_dir).name


def model_without_weights(recipe: Recipe) -> tuple[OmniModel, OmniProcessor]:
    """Build the model of a recipe with shapes only, and the processor of its rows."""
    quiet_libraries()
    return build_from_recipe(recipe, init_device="meta")


def _row(loader: StepLoader, index: int) -> Row:
    _, source, position = loader.order.draw(index)
    return loader.sources[source][position]


_MOST_PACKS = 200  # that are filled to find the fill


def data_stats(recipe: Recipe | str | Path, overrides: Sequence[str] = (), *, rows: int = 2000) -> DataStats:
    """Measure the training data of a recipe: lengths, modalities, rejected rows, epochs, expected fill.

    Rows are prepared as in training, media included, but no weights are read. ``recipe`` is one, or a file or name,
    with ``overrides`` such as ``data.pack_tokens=512``. Of a larger data set ``rows`` are drawn at random, always the
    same ones. Raises UserError: the recipe, its model or its data cannot be used.
    """
    if rows < 1:
        raise UserError(f"rows: found {rows}; expected a number above 0")
    resolved, name = recipe_and_name(recipe, overrides)
    model, processor = model_without_weights(resolved)
    contract, sources = model.runner.contract, open_sources(resolved.data.train)
    budget = PackBudget(resolved.data.pack_tokens, resolved.data.pack_elements, model.media_names)
    measured: list[Sequence[Measured]] = []
    with Activity(console, "measuring rows") as activity:
        for source, overlong in zip(sources, resolved.data.overlong_of_sources(), strict=True):
            found: list[Measured] = []
            rows_of_source = measure(
                source, processor, most=rows, budget=budget, overlong=overlong, without_tails=contract.without_tails
            )
            for row in rows_of_source:
                found.append(row)
                activity.update(f"measuring {source.name}: {len(found):,} of {min(rows, len(source)):,} rows")
            measured.append(found)
    unread = unread_notes(sources, processor.renderer, resolved)
    packing = _packing(resolved, sources, measured, budget, contract)
    return DataStats.of(name, resolved, sources, measured, packing, unread)


def _packing(
    recipe: Recipe,
    sources: Sequence[RowSource],
    measured: Sequence[Sequence[Measured]],
    budget: PackBudget,
    contract: Contract,
) -> Packing | None:
    """Fill packs as a run does; None: all rows were rejected."""
    if all(isinstance(row, Rejected) for rows in measured for row in rows):
        return None
    slots = recipe.train.packs_per_step if [*map(len, measured)] == [*map(len, sources)] else None
    return pack_measures(
        measured,
        recipe.data,
        budget,
        seed=recipe.train.seed,
        packs=min(_MOST_PACKS, recipe.train.steps * recipe.train.packs_per_step // (slots or 1)),
        alone=not contract.packs,
        slots=slots,
    )
