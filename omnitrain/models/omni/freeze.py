"""Freezing by component or module name."""

from __future__ import annotations

from collections.abc import Sequence

from omnitrain.models.omni.freeze_batchnorm import rest_frozen_statistics
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.named_parameters import parameters_named


def freeze(model: OmniModel, names: Sequence[str]) -> None:
    """Take parameters out of training, and statistics beside them. LoRA adapters beside them go on to train.

    Args:
        model: changed in place.
        names: see :func:`omnitrain.models.omni.named_parameters.parameters_named`.

    Raises:
        UserError: a name that matches no parameter; the nearest name is suggested.
    """
    adapters = {model.get_parameter(name) for name in model.adapter_names}
    for name in names:
        for parameter in parameters_named(model, name, "model.freeze"):
            parameter.requires_grad_(parameter in adapters)
    rest_frozen_statistics(model)
