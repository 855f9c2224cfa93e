"""Freezing by component or module name."""

from __future__ import annotations

from collections.abc import Sequence

from omnitrain.errors import UserError
from omnitrain.models.omni import OmniModel
from omnitrain.recipe.suggest import nearest


def freeze(model: OmniModel, names: Sequence[str]) -> None:
    """Take parameters out of training.

    Args:
        model: changed in place.
        names: components (``foundation``) or modules below them (``image_encoder.tower``).

    Raises:
        UserError: a name that matches no module, or one without parameters; the nearest name is suggested.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules or not any(True for _ in modules[name].parameters()):
            candidates = sorted(path for path in modules if path.count(".") <= name.count("."))
            close = nearest(name, candidates)
            hint = f"did you mean {close!r}?" if close else f"components: {sorted(model.components)}"
            raise UserError(f"model.freeze: {name!r} matches no parameter; {hint}")
        modules[name].requires_grad_(False)
