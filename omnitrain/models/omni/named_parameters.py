"""Parameters by the names that users give: of components, of modules, or their own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.recipe.suggest import nearest


def parameters_named(model: OmniModel, name: str, key: str) -> list[nn.Parameter]:
    """What a name stands for.

    Args:
        model: laid out or not.
        name: of a component (``foundation``, ``image_encoder``), or of a module or parameter below one
            (``image_encoder.tower``, ``foundation.model.visual.merger``).
        key: of the recipe, for the error.

    Raises:
        UserError: it matches no parameter; the nearest name is suggested.
    """
    components, modules = model.components, dict(model.named_modules())
    matched = list(components[name].values() if name in components else _below(modules, name))
    if not matched:
        candidates = sorted({*components, *(path for path in modules if path.count(".") <= name.count("."))})
        close = _same_tail(modules, name) or nearest(name, candidates)
        hint = f"did you mean {close!r}?" if close else f"components: {sorted(components)}"
        hint = _without_component(model, name) or hint
        raise UserError(f"{key}: {name!r} matches no parameter; {hint}")
    return matched


def _without_component(model: OmniModel, name: str) -> str:
    """What to name instead of a component that would read a modality, had it one."""
    runner = model.runner
    if name not in {f"{modality}_encoder" for modality in runner.native.in_forward}:
        return ""
    modules = ", ".join(f"{FOUNDATION}.{path}" for path in runner.contract.beyond_text if "*" not in path)
    return f"the foundation's own forward reads it, with modules of the foundation; name these: {modules}"


def _same_tail(modules: dict[str, nn.Module], name: str) -> str | None:
    """The shortest path that ends as ``name`` does: users know HF's names, which are further below here."""
    parts = name.split(".")
    tails = [".".join(parts[cut:]) for cut in range(len(parts)) if not parts[cut].isdigit()]
    paths = [path for path, module in modules.items() if any(True for _ in module.parameters())]
    found = (min(same, key=len) for tail in tails if (same := [path for path in paths if path.endswith(f".{tail}")]))
    return next(found, None)


def _below(modules: dict[str, nn.Module], name: str) -> Iterator[nn.Parameter]:
    if name in modules:
        yield from modules[name].parameters()
    else:
        owner, _, attribute = name.rpartition(".")
        parameter = getattr(modules.get(owner), attribute, None)
        if isinstance(parameter, nn.Parameter):
            yield parameter
