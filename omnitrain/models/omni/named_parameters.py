"""Find parameters by the name of a component, a module or the parameter itself."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.recipe.suggest import nearest


def parameters_named(model: OmniModel, name: str, key: str) -> list[nn.Parameter]:
    """Return the parameters that a name stands for.

    Args:
        model: parallelized or not.
        name: name of a component (``foundation``, ``image_encoder``), or path of a module or parameter below it
            (``image_encoder.tower``, ``foundation.model.visual.merger``).
        key: key of the recipe, for the error.

    Raises:
        UserError: the name matches no parameter; the message suggests the nearest name.
    """
    components, modules = model.components, dict(model.named_modules())
    matched = list(components[name].values() if name in components else _below(modules, name))
    if not matched:
        candidates = sorted({*components, *(path for path in modules if path.count(".") <= name.count("."))})
        close = _same_tail(modules, name) or nearest(name, candidates)
        hint = f"did you mean {close!r}?" if close else f"components: {sorted(components)}"
        hint = _in_forward_hint(model, name) or hint
        raise UserError(f"{key}: {name!r} matches no parameter; {hint}")
    return matched


def _in_forward_hint(model: OmniModel, name: str) -> str:
    """The modules to name where the foundation's forward reads the modality, so that it has no encoder component."""
    runner = model.runner
    if name not in {f"{modality}_encoder" for modality in runner.native.in_forward}:
        return ""
    modules = ", ".join(f"{FOUNDATION}.{path}" for path in runner.contract.beyond_text if "*" not in path)
    return f"the foundation's forward reads this modality itself; name its modules: {modules}"


def _same_tail(modules: dict[str, nn.Module], name: str) -> str | None:
    """The shortest path that ends like ``name``: users know HF's paths, which have a prefix here."""
    parts = name.split(".")
    tails = [".".join(parts[cut:]) for cut in range(len(parts)) if not parts[cut].isdigit()]
    paths = [path for path, module in modules.items() if any(True for _ in module.parameters())]
    matches = (min(same, key=len) for tail in tails if (same := [path for path in paths if path.endswith(f".{tail}")]))
    return next(matches, None)


def _below(modules: dict[str, nn.Module], name: str) -> Iterator[nn.Parameter]:
    if name in modules:
        yield from modules[name].parameters()
    else:
        owner, _, attribute = name.rpartition(".")
        parameter = getattr(modules.get(owner), attribute, None)
        if isinstance(parameter, nn.Parameter):
            yield parameter
