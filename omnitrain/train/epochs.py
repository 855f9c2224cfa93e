"""Steps and packs of a run whose recipe counts epochs and samples."""

from __future__ import annotations

import math
from itertools import islice

from omnitrain.data.loading.loader import build_dataloader
from omnitrain.data.sources.stream import ENDLESS
from omnitrain.errors import UserError
from omnitrain.recipe import Recipe
from omnitrain.train.build_from_recipe import build_from_recipe

_DRAWS = 512  # rows to pack; among so many, the mean length is known within a few per cent


def counts_samples(recipe: Recipe) -> bool:
    """Whether :func:`in_steps` has something to measure."""
    return recipe.train.epochs is not None or recipe.train.samples_per_step is not None


def in_steps(recipe: Recipe) -> Recipe:
    """Return the recipe with ``steps`` in place of ``epochs``, and ``micro_batches`` in place of ``samples_per_step``.

    It packs the first rows of the run's order, in this process. The result depends on the recipe and its data only.

    Args:
        recipe: any recipe; one that counts in steps and packs is returned as it is.

    Raises:
        UserError: the model cannot be built, or cannot use the data.
    """
    if not counts_samples(recipe):
        return recipe
    train = recipe.train
    draws_per_pack, samples_per_pack, rows = _measured(recipe)
    changes: dict[str, object] = {}
    micro_batches = train.micro_batches
    if train.samples_per_step is not None:
        micro_batches = max(1, round(train.samples_per_step / samples_per_pack))
        changes |= {"micro_batches": micro_batches, "samples_per_step": None}
    if train.epochs is not None:
        steps = max(1, math.ceil(train.epochs * rows / (draws_per_pack * micro_batches)))
        changes |= {"steps": steps, "epochs": None}
    return recipe.model_copy(update={"train": train.model_copy(update=changes)})


def _measured(recipe: Recipe) -> tuple[float, float, int]:
    """Return the rows and the samples of a pack, which rejected rows make different, and the rows of all data sets."""
    model, processor = build_from_recipe(recipe, "meta")
    contract = model.runner.contract
    loader = build_dataloader(
        recipe.data.model_copy(update={"workers": 0}),
        processor,
        seed=recipe.train.seed,
        alone=not contract.packs,
        without_tails=contract.without_tails,
        media_names=model.media_names,
    )
    rows = sum(loader.order.lengths)
    if recipe.train.epochs is not None and rows >= ENDLESS:
        raise UserError(
            "train.epochs: data.train has a streamed data set, whose number of rows is not known; set train.steps, or "
            "`limit` of the data set"
        )
    packs = drawn = samples = 0
    for (pack,) in islice(loader, _DRAWS):
        (state,) = loader.state().slots.values()
        packs, drawn, samples = packs + 1, state.next_index - len(state.held), samples + len(pack.info.lengths)
        if drawn >= min(rows, _DRAWS):
            break
    return drawn / packs, samples / packs, rows
