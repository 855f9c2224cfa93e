"""Check the arguments of ``verify``, and call its model factory."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel
from transformers import PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError
from omnitrain.parallel.spawn.notebook import pickled
from omnitrain.recipe.layout import Layout
from omnitrain.recipe.parallel import ParallelPlan

Factory = Callable[[], PreTrainedModel] | str


def require_arguments(
    model_factory: Factory,
    samples: Sequence[Any],
    layouts: Sequence[str | Layout | ParallelPlan],
    nproc: int,
    tolerance: float,
) -> None:
    """Check types and ranges. Raises UserError: names the first argument with a wrong type or value."""
    _require_list("layouts", layouts, (str, Layout, ParallelPlan), "layouts such as 'dp2', or parallel plans")
    if not layouts:
        raise UserError("no layouts to verify; give at least one, such as dp2")
    require_ranks(nproc)
    if not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf:
        raise UserError(f"tolerance: found {tolerance!r}; expected a relative error above 0, such as 1e-5")
    _require_list("samples", samples, (Sample, Mapping), "Samples, or dictionaries of one sample each with labels")
    if isinstance(model_factory, PreTrainedModel) or not (callable(model_factory) or isinstance(model_factory, str)):
        raise UserError(
            f"model_factory: found a {type(model_factory).__name__}; expected a function that builds the model (every "
            "rank calls it), or its name as 'module:function'"
        )
    _require_picklable(model_factory)


def require_ranks(nproc: int) -> None:
    """Check the number of ranks that may run at a time. Raises UserError: it is not a positive integer."""
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise UserError(f"nproc: found {nproc!r}; expected a number of ranks, at least 1")


def build_with(factory: Factory) -> PreTrainedModel:
    """Call ``factory`` with torch's generator at seed 0, the same in every process; UserError: it makes no model."""
    make = _named(factory) if isinstance(factory, str) else factory
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"the model factory returned a {type(model).__name__}; expected a transformers model or an OmniModel"
        )
    return model


def require_same_weights(model: PreTrainedModel, first: dict[str, bytes]) -> None:
    """Raise UserError unless the factory builds the weights whose digests are in ``first``; the first call fills it."""
    for name, parameter in model.named_parameters():
        digest = hashlib.blake2b(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy()).digest()
        if first.setdefault(name, digest) != digest:
            raise UserError(
                f"the model factory builds a different model each time ({name} differs); seed its random generators "
                "(torch's default generator is seeded before each call)"
            )


def require_losses(batch: Sequence[Sample]) -> None:
    """Raise UserError if no sample has a token to predict: without one no gradient exists to compare."""
    if not any(any(Pack.from_samples([sample]).loss_counts().values()) for sample in batch):
        raise UserError(
            "none of the samples has a token to predict: all labels are -100, except perhaps the label of a first "
            "token, which no token precedes"
        )


def _require_list(name: str, value: object, types: tuple[type, ...], expected: str) -> None:
    if isinstance(value, str | Mapping | BaseModel) or not hasattr(value, "__iter__") or not hasattr(value, "__len__"):
        raise UserError(f"{name}: found a {type(value).__name__}; expected a list of {expected}")
    for index, element in enumerate(value):
        if not isinstance(element, types):
            raise UserError(f"{name}: found a {type(element).__name__} at index {index}; expected {expected}")


def _require_picklable(factory: Factory) -> None:
    try:
        pickled(factory)
    except Exception as error:  # pickling can raise any type
        raise UserError(
            f"the model factory cannot be sent to other processes ({error}); expected a function at the top level of a "
            "module, a functools.partial of one, or its name as 'module:function'"
        ) from None


def _named(factory: str) -> Callable[[], Any]:
    module, _, name = factory.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"no model factory {factory!r}; expected 'module:function': {error}") from None
