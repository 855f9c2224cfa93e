"""Configs that no other model reads."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig


def take_own_configs(models: Iterable[nn.Module]) -> None:
    """Replace configs below ``models`` by copies; those that were the same object stay one.

    How a model attends and runs its experts is written into its configs, which transformers takes from its caller as
    they are: the next model made from them would be asked for what was chosen for this one.
    """
    copies: dict[int, Any] = {}
    for module in dict.fromkeys(module for model in models for module in model.modules()):
        for name, value in [*vars(module).items()]:
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(value, copies)
