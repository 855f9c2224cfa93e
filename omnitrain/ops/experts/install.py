"""Make models use omnitrain's experts; the name in their configs holds the choice of backend."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers.integrations.moe import ExpertsInterface

from omnitrain.errors import UserError
from omnitrain.ops.experts.entry import AUTO, EXPERTS, SETTINGS, omnitrain_experts, settings_of
from omnitrain.ops.experts.weights import experts_in
from omnitrain.transformers_private import experts_of, set_experts_of

_PREFIX = "omnitrain"


def use_omnitrain_experts(model: nn.Module, backend: str = AUTO) -> Counter[str]:
    """Make all experts in ``model`` compute through :func:`omnitrain_experts`; return class -> number of layers.

    The choice is stored in their configs, so layers that share a config object share the choice; a later call changes
    it. ``backend`` is ``auto``, ``torch``, or one that transformers registers; another one is a UserError.
    """
    if backend not in _NAMES.values():
        raise UserError(f"experts: no backend {backend!r}; expected {', '.join(_NAMES.values())}")
    found = [module for _, module in experts_in(model)]
    for module in found:
        config: Any = module.config
        set_experts_of(config, _name(backend))
    return Counter(type(module).__name__ for module in found)


def set_experts(experts: nn.Module, **settings: Any) -> None:
    """Change fields of the settings of a layer's ``experts``, and let them compute by :func:`omnitrain_experts`."""
    setattr(experts, SETTINGS, replace(settings_of(experts), **settings))
    use_omnitrain_experts(experts, backend_of(experts))


def backend_of(experts: nn.Module) -> str:
    """Return the backend that :func:`use_omnitrain_experts` set for a layer's experts; ``auto`` if none was set."""
    config: Any = experts.config
    return _NAMES.get(experts_of(config) or "", AUTO)


def _name(backend: str) -> str:
    return _PREFIX if backend == AUTO else f"{_PREFIX}_{backend}"


_NAMES = {_name(backend): backend for backend in (AUTO, *(known.name for known in EXPERTS))}
for _registered, _backend in _NAMES.items():
    ExpertsInterface.register(_registered, partial(omnitrain_experts, backend=_backend))
