"""``omnitrain check``: validate a recipe in seconds, without loading weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint.store import newest_checkpoint
from omnitrain.data.loading.loader import first_samples, require_usable
from omnitrain.data.packing.sample import Rejected
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.unread_media import require_shown
from omnitrain.data.sources.rows import RowSource, open_sources
from omnitrain.errors import UserError
from omnitrain.models.hf.load import config_at
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.freeze import freeze
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.summary import component_rows
from omnitrain.parallel.resolve import require_fit
from omnitrain.recipe import ParallelPlan, Recipe
from omnitrain.recipe.component_configs import OmniConfig
from omnitrain.recipe.parallel import PlanError
from omnitrain.train.build_from_recipe import build_from_recipe, require_ops
from omnitrain.train.data import spared
from omnitrain.train.device import use_device
from omnitrain.train.evaluate.evaluate import load_scorer
from omnitrain.train.lr_groups import peaks_of
from omnitrain.train.metrics.display import console, quiet_libraries, show_components, show_contract, show_unused
from omnitrain.train.metrics.trackers import require_trackers
from omnitrain.train.precision import compute_dtype, mixed_precision
from omnitrain.train.run_state.run_folder import RunFolder
from omnitrain.train.useless_keys import require_effect
from omnitrain.train.verbs.fit_check import forward_problems, weights_problems


def check_recipe(recipe: Recipe) -> list[str]:
    """Build the model without weights, open the data, prepare one row of every source, and print the results.

    Weight files are compared with the model by name and shape. Every component runs once, on tensors without content.

    Returns:
        One message per problem; empty if the recipe would run.
    """
    quiet_libraries()
    problems: list[str] = []

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except UserError as error:
            problems.append(str(error))
            return None

    built = attempt(lambda: build_from_recipe(recipe, init_device="meta"))
    problems += weights_problems(recipe.model)
    runs = built and attempt(lambda: built[0].runner)
    device = attempt(lambda: use_device(recipe.train))
    if runs:
        _show_model(built[0])
        for check in _model_checks(recipe, built[0], built[1], device):
            attempt(check)
        broken = forward_problems(built[0])
        problems += broken
        runs = not broken
    opened: dict[str, list[RowSource]] = {}
    for kind, sources in (("train", recipe.data.train), ("heldout", recipe.data.heldout)):
        opened[kind] = attempt(functools.partial(open_sources, sources)) or []
        if runs:
            cut = kind == "train" and built[0].runner.contract.without_tails
            problems += _check_rows(kind, opened[kind], built[1], recipe.data.pack_tokens, cut)
    if runs and opened["train"]:
        attempt(lambda: require_shown(opened["train"], opened["heldout"], built[1], spared(recipe, built[0])))
    attempt(lambda: RunFolder(recipe))
    attempt(lambda: load_scorer(recipe.evaluation.scorer if recipe.evaluation else None))
    attempt(lambda: require_trackers(recipe))
    # A problem that another message repeats with its key is dropped.
    return [one for one in dict.fromkeys(problems) if not any(other.endswith(f": {one}") for other in problems)]


def _model_checks(
    recipe: Recipe, model: OmniModel, processor: OmniProcessor, device: torch.device | None
) -> Iterator[Callable[[], None]]:
    """Yield the checks of a run's model; without a device, those that need none."""
    mixed = mixed_precision(recipe.train, device.type if device is not None else "cpu")
    yield lambda: _require_plan(model, recipe.parallel, mixed)
    if device is not None:
        yield lambda: require_ops(model, recipe.model.ops, device, compute_dtype(recipe.parallel, mixed))
    yield lambda: _require_rates(model, recipe)
    yield lambda: require_effect(recipe, model, processor)


def check_model(path: str) -> None:
    """Check a HF model or a saved omni model as a foundation, without its weights; print components and findings.

    Args:
        path: Hub id, folder of a model, or folder of a run (its newest checkpoint is used).

    Raises:
        UserError: there is no model, or it cannot be trained here; the message gives the measurements.
    """
    quiet_libraries()
    if Path(path, "checkpoints").is_dir():
        path = str(newest_checkpoint(path))
    is_omni = isinstance(config_at(path), OmniConfig)
    parts: dict[str, Any] = {"config_path": path} if is_omni else {"foundation": path}
    _show_model(build_omni_model(**parts, init_device="meta"))


def _require_plan(model: OmniModel, plan: ParallelPlan, mixed_precision: bool | None) -> None:
    try:
        require_fit(model, plan, mixed_precision)
    except PlanError as error:
        raise error.under("parallel") from None


def _require_rates(model: OmniModel, recipe: Recipe) -> None:
    """Freeze the model as the plan says, and check that ``learning_rates`` names trained parameters."""
    freeze(model, [name for name in model.components if recipe.parallel.of(name).freeze])
    peaks_of(model, recipe.train.optimizer)


def _show_model(model: OmniModel) -> None:
    show_components(component_rows(model))
    show_unused(model.config.unused_tensors)
    show_contract(model.runner.contract, in_full=True)


def _check_rows(kind: str, tables: list[RowSource], processor: OmniProcessor, pack_tokens: int, cut: bool) -> list[str]:
    problems = []
    for name, sample in first_samples(tables, processor):
        if isinstance(sample, UserError):
            problems.append(str(sample))
        elif isinstance(sample, Rejected):
            problems.append(f"data.{kind}: row {sample.id!r}: {sample.reason}")
        elif (length := len(sample.without_tail() if cut else sample)) > pack_tokens:
            problems.append(f"data.{kind}: row {sample.id!r} has {length} tokens, data.pack_tokens is {pack_tokens}")
        else:
            trained = int(sample.loss_mask.sum()) + sum(s.item.num_tokens for s in sample.spans if s.is_target)
            console.print(f"{kind} {name}: the first row has {len(sample)} tokens, {trained} of them trained")
    try:
        require_usable(tables, processor)
    except UserError as error:
        problems += str(error).splitlines()
    return problems
