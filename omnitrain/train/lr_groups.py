"""Separate learning rates and weight decays for modules of a model, and the parameters that Muon updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import token_matrices
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.named_parameters import hidden_matrices, parameters_named
from omnitrain.optim.build import build_optimizer, decayed_parameters
from omnitrain.parallel.layout import ModelLayout
from omnitrain.recipe import Optimizer
from omnitrain.recipe.strict import Idle, idle_problems

_NODE = "train.optimizer"


def optimizer_of(model: OmniModel, settings: Optimizer, layout: ModelLayout | None) -> torch.optim.Optimizer:
    """Build the optimizer of a model as it will train; without a ``layout``, in one process."""
    offloaded = layout.offloaded(model) if layout is not None else ()
    own = peaks_of(model, settings), decays_of(model, settings), matrices_of(model, settings)
    return build_optimizer(model, settings, offloaded, *own)


def peaks_of(model: OmniModel, settings: Optimizer) -> dict[nn.Parameter, float]:
    """Return the peak learning rate of each trained parameter that ``learning_rates`` names; ``model`` is sharded."""
    peaks = _of_parameters(model, settings.learning_rates, "learning_rates")
    if all(parameter in peaks for parameter in model.parameters() if parameter.requires_grad):
        idle = Idle("learning_rate", "but `learning_rates` covers all trained parameters; remove one of the two")
        if problems := idle_problems(settings, [idle], _NODE):
            raise UserError(problems[0])
    return peaks


def decays_of(model: OmniModel, settings: Optimizer) -> dict[nn.Parameter, float]:
    """Return parameter -> weight decay, by ``weight_decays``; 0 where only rows of added tokens train."""
    decays = _of_parameters(model, settings.weight_decays, "weight_decays", decayed_parameters(model))
    return decays | dict.fromkeys((model.get_parameter(name) for name in token_matrices(model)), 0.0)


def matrices_of(model: OmniModel, settings: Optimizer) -> set[nn.Parameter]:
    """Return the parameters that Muon updates, at least one if the recipe uses it."""
    if settings.kind != "muon":
        return set()
    matrices = {parameter for parameter in hidden_matrices(model) if parameter.requires_grad}
    if not matrices:
        raise UserError(
            f"{_NODE}.kind: found 'muon', but no matrix of a hidden layer trains (LoRA adapters, embeddings and heads "
            "stay with AdamW); use `adamw`"
        )
    return matrices


def _of_parameters(
    model: OmniModel, values: Mapping[str, float], key: str, among: Collection[nn.Parameter] | None = None
) -> dict[nn.Parameter, float]:
    """Return trained parameter (``among`` these, if given) -> the value of its longest path."""
    key = f"{_NODE}.{key}"
    found: dict[nn.Parameter, float] = {}
    names: dict[nn.Parameter, str] = {}
    for name in sorted(values, key=lambda name: name.count(".")):
        trained = [parameter for parameter in parameters_named(model, name, key) if parameter.requires_grad]
        if not trained:
            raise UserError(f"{key}: {name!r} has no trained parameter; remove it here, or do not freeze it")
        matching = [parameter for parameter in trained if among is None or parameter in among]
        if not matching:
            raise UserError(
                f"{key}: {name!r} has only norms and biases, to which weight decay does not apply; remove it here"
            )
        found |= dict.fromkeys(matching, values[name])
        names |= dict.fromkeys(matching, name)
    if unused := sorted(values.keys() - set(names.values())):
        what = "parameters" if among is None else "parameters with weight decay"
        names_shown = ", ".join(map(repr, unused))
        raise UserError(f"{key}: longer names cover all trained {what} of {names_shown}; remove it")
    return found
