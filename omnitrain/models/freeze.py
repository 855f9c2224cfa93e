"""Freezing by component or module name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from omnitrain.errors import UserError
from omnitrain.models.omni import OmniModel
from omnitrain.recipe.suggest import nearest


def freeze(model: OmniModel, names: Sequence[str]) -> None:
    """Take parameters out of training. LoRA adapters beside them go on to train.

    Args:
        model: changed in place.
        names: components (``foundation``, ``image_encoder``), or modules and parameters below them
            (``image_encoder.tower``, ``foundation.model.visual.merger``).

    Raises:
        UserError: a name that matches no parameter; the nearest name is suggested.
    """
    components = model.components
    modules = dict(model.named_modules())
    adapters = {model.get_parameter(name) for name in model.adapter_names}
    for name in names:
        matched = list(components[name].values() if name in components else _below(modules, name))
        if not matched:
            candidates = sorted({*components, *(path for path in modules if path.count(".") <= name.count("."))})
            close = nearest(name, candidates)
            hint = f"did you mean {close!r}?" if close else f"components: {sorted(components)}"
            raise UserError(f"model.freeze: {name!r} matches no parameter; {hint}")
        for parameter in matched:
            parameter.requires_grad_(parameter in adapters)


def _below(modules: dict[str, nn.Module], name: str) -> Iterator[nn.Parameter]:
    if name in modules:
        yield from modules[name].parameters()
    else:
        owner, _, attribute = name.rpartition(".")
        parameter = getattr(modules.get(owner), attribute, None)
        if isinstance(parameter, nn.Parameter):
            yield parameter
