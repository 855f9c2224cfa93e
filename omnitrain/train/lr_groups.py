"""Separate learning rates for modules of a model."""

from __future__ import annotations

from torch import nn

from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.named_parameters import parameters_named
from omnitrain.recipe import Optimizer
from omnitrain.recipe.useless_keys import Idle, idle_problems

_KEY = "train.optimizer.learning_rates"


def peaks_of(model: OmniModel, settings: Optimizer) -> dict[nn.Parameter, float]:
    """Return the peak learning rate of each trained parameter that ``learning_rates`` names.

    Args:
        model: the model, with frozen components, sharded as it will train.
        settings: the recipe's optimizer node.

    Raises:
        UserError: a name matches no trained parameter, or no parameter trains with a learning rate.
    """
    peaks: dict[nn.Parameter, float] = {}
    names: dict[nn.Parameter, str] = {}
    for name in sorted(settings.learning_rates, key=lambda name: name.count(".")):
        trained = [parameter for parameter in parameters_named(model, name, _KEY) if parameter.requires_grad]
        if not trained:
            raise UserError(f"{_KEY}: {name!r} has no trained parameter; remove it here, or do not freeze it")
        peaks |= dict.fromkeys(trained, settings.learning_rates[name])
        names |= dict.fromkeys(trained, name)
    if unused := sorted(settings.learning_rates.keys() - set(names.values())):
        raise UserError(
            f"{_KEY}: longer names cover all trained parameters of {', '.join(map(repr, unused))}; remove it"
        )
    if all(parameter in peaks for parameter in model.parameters() if parameter.requires_grad):
        idle = Idle("learning_rate", "but `learning_rates` covers all trained parameters; remove one of the two")
        if problems := idle_problems(settings, [idle], "train.optimizer"):
            raise UserError(problems[0])
    return peaks
