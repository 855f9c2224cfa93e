"""Freezing by component or module name."""

from __future__ import annotations

from collections.abc import Sequence

from omnitrain.models.adapters.lora import token_matrices
from omnitrain.models.omni.model import OmniModel, rest_frozen_statistics
from omnitrain.models.omni.named_parameters import parameters_named


def freeze(model: OmniModel, names: Sequence[str]) -> None:
    """Freeze parameters, not LoRA adapters, and batch statistics of their modules; UserError: a name matches none."""
    trained = {model.get_parameter(name) for name in (*model.adapter_names, *token_matrices(model))}
    for name in names:
        for parameter in parameters_named(model, name, "model.freeze"):
            parameter.requires_grad_(parameter in trained)
    rest_frozen_statistics(model)
