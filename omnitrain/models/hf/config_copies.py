"""Give a model copies of its configs."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig


def take_own_configs(models: Iterable[nn.Module]) -> None:
    """Replace the configs of all modules in ``models`` by copies; a config shared by modules stays shared.

    We write choices (attention, experts) into configs; transformers would hand these to the next model of a config.
    """
    copies: dict[int, Any] = {}
    for module in dict.fromkeys(module for model in models for module in model.modules()):
        for name, value in [*vars(module).items()]:
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(value, copies)
