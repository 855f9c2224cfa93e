"""What ``verify`` is called with, refused in words where it cannot be meant."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel
from transformers import PreTrainedModel

from omnitrain.data.pack import Pack
from omnitrain.data.sample import Sample
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
    """Look at types and ranges alone.

    Raises:
        UserError: the first argument that is something else.
    """
    _require_list("layouts", layouts, (str, Layout, ParallelPlan), "layouts such as 'dp2', or parallel plans")
    if not layouts:
        raise UserError("no layout to verify; give some, such as dp2")
    require_ranks(nproc)
    if not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf:
        raise UserError(f"tolerance: found {tolerance!r}; expected a relative error above 0, such as 1e-5")
    _require_list("samples", samples, (Sample, Mapping), "Samples, or dictionaries of one sample each with labels")
    if isinstance(model_factory, PreTrainedModel) or not (callable(model_factory) or isinstance(model_factory, str)):
        raise UserError(
            f"model_factory: found a {type(model_factory).__name__}; expected a function that makes the model, for "
            "every rank makes its own, or its name as 'module:function'"
        )
    _require_picklable(model_factory)


def require_ranks(nproc: int) -> None:
    """The number of ranks that may run at a time.

    Raises:
        UserError: it is none.
    """
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise UserError(f"nproc: found {nproc!r}; expected a number of ranks, from 1")


def made_by(factory: Factory) -> PreTrainedModel:
    """The model that ``factory`` makes, the same in every process: what it draws of torch's numbers begins with seed 0.

    Raises:
        UserError: there is no such factory, or it makes something else.
    """
    make = _named(factory) if isinstance(factory, str) else factory
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"the model factory returned a {type(model).__name__}; expected a model of transformers or an OmniModel"
        )
    return model


def require_same_weights(model: PreTrainedModel, first: dict[str, bytes]) -> None:
    """A factory makes the same model at every call, or what is compared are two models.

    Args:
        model: of this call.
        first: digests of the weights of the first one, which are put in by that.

    Raises:
        UserError: they differ.
    """
    for name, parameter in model.named_parameters():
        digest = hashlib.blake2b(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy()).digest()
        if first.setdefault(name, digest) != digest:
            raise UserError(
                f"the model factory makes another model each time ({name} differs); seed what it draws from "
                "(torch's own generator is seeded before each call)"
            )


def require_losses(batch: Sequence[Sample]) -> None:
    """Without a token to predict there is no gradient, and nothing to compare.

    Raises:
        UserError: no sample has one.
    """
    if not any(any(Pack.from_samples([sample]).loss_counts().values()) for sample in batch):
        raise UserError(
            "none of the samples has a token to predict: labels are -100 everywhere, or but for a first token, which "
            "nothing precedes"
        )


def _require_list(name: str, found: object, kinds: tuple[type, ...], of: str) -> None:
    if isinstance(found, str | Mapping | BaseModel) or not hasattr(found, "__iter__") or not hasattr(found, "__len__"):
        raise UserError(f"{name}: found a {type(found).__name__}; expected a list of {of}")
    for number, item in enumerate(found):
        if not isinstance(item, kinds):
            raise UserError(f"{name}: found a {type(item).__name__} at place {number}; expected {of}")


def _require_picklable(factory: Factory) -> None:
    try:
        pickled(factory)
    except Exception as error:  # each kind of object refuses in its own way
        raise UserError(
            f"the model factory cannot be sent to other processes ({error}); expected a function at a module's top "
            "level, a functools.partial of one, or its name as 'module:function'"
        ) from None


def _named(factory: str) -> Callable[[], Any]:
    module, _, name = factory.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"no model factory {factory!r}, of the form 'module:function': {error}") from None
