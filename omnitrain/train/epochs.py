"""Steps and packs of a run whose recipe counts epochs and samples."""

from __future__ import annotations

import math
from itertools import islice

from omnitrain.data.loading.loader import StepLoader, build_dataloader
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.stream import ENDLESS
from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe import Recipe
from omnitrain.train.build_from_recipe import build_from_recipe

_DRAWS = 512  # rows to pack; among so many, the mean length is known within a few per cent


def counts_samples(recipe: Recipe) -> bool:
    """Whether :func:`in_steps` has something to measure."""
    return recipe.train.epochs is not None or recipe.train.samples_per_step is not None


def in_steps(recipe: Recipe) -> Recipe:
    """Return the recipe in steps and packs in place of epochs and samples, counted by packing its first rows."""
    if not counts_samples(recipe):
        return recipe
    train, measured = recipe.train, _Measured(recipe)
    changes: dict[str, object] = {}
    packs = train.packs_per_step
    if train.samples_per_step is not None:
        packs = max(1, round(train.samples_per_step / measured.of_pack(1)[1]))
        changes |= {"packs_per_step": packs, "samples_per_step": None}
    if train.epochs is not None:
        rows_per_step = measured.of_pack(packs)[0] * packs
        changes |= {"steps": max(1, math.ceil(train.epochs * measured.rows / rows_per_step)), "epochs": None}
    return recipe.model_copy(update={"train": train.model_copy(update=changes)})


class _Measured:
    """The packs of a recipe's data, as a run fills them; ``rows``: of all data sets."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, (self._model, self._processor) = recipe, build_from_recipe(recipe, "meta")
        self.rows = sum(self._loader(1).order.lengths)
        if recipe.train.epochs is not None and self.rows >= ENDLESS:
            raise UserError(
                "train.epochs: data.train has a streamed data set, whose number of rows is not known; set train.steps, "
                "or `limit` of the data set"
            )

    def of_pack(self, slots: int) -> tuple[float, float]:
        """Return mean rows (rejected ones, too) and samples of a pack of the first of ``slots`` slots."""
        loader, packs, drawn, samples = self._loader(slots), 0, 0, 0
        for (pack,) in islice(loader, _DRAWS):
            (state,) = loader.state().slots.values()
            packs, drawn, samples = packs + 1, state.next_index // slots - len(state.held), samples + len(pack.info.ids)
            if drawn >= min(self.rows / slots, _DRAWS):
                break
        return drawn / packs, samples / packs

    def _loader(self, slots: int) -> StepLoader:
        return loader_of(self._recipe, self._model, self._processor, slots, ranks=slots)


def loader_of(recipe: Recipe, model: OmniModel, processor: OmniProcessor, slots: int, *, ranks: int = 1) -> StepLoader:
    """Return the loader of a recipe's steps of ``slots`` packs, in this process and for the first of ``ranks``."""
    contract = model.runner.contract
    return build_dataloader(
        recipe.data.model_copy(update={"workers": 0}),
        processor,
        seed=recipe.train.seed,
        slots=slots,
        ranks=ranks,
        alone=not contract.packs,
        without_tails=contract.without_tails,
        media_names=model.media_names,
    )
