"""Learning rates of their own for parts of a model."""

from __future__ import annotations

from torch import nn

from omnitrain.errors import UserError
from omnitrain.models.named import parameters_named
from omnitrain.models.omni import OmniModel
from omnitrain.recipe import Optimizer

_KEY = "train.optimizer.learning_rates"


def peaks_of(model: OmniModel, settings: Optimizer) -> dict[nn.Parameter, float]:
    """Trained parameters that ``learning_rates`` names -> their peaks.

    Args:
        model: frozen and laid out as it will train.
        settings: of the recipe.

    Raises:
        UserError: a name that matches no parameter, or none that trains.
    """
    peaks: dict[nn.Parameter, float] = {}
    for name in sorted(settings.learning_rates, key=lambda name: name.count(".")):
        trained = [parameter for parameter in parameters_named(model, name, _KEY) if parameter.requires_grad]
        if not trained:
            raise UserError(f"{_KEY}: nothing of {name!r} trains; remove it here, or from what freezes it")
        peaks |= dict.fromkeys(trained, settings.learning_rates[name])
    return peaks
