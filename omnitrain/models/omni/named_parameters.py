"""Find parameters by the name of a component, a module or the parameter itself, and the matrices of hidden layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import token_matrices
from omnitrain.models.omni.model import OmniModel, rest_frozen_statistics
from omnitrain.optim.build import roles_of
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.recipe.suggest import nearest


def parameters_named(model: OmniModel, name: str, key: str) -> list[nn.Parameter]:
    """Return the parameters that a name stands for: a component, or a path of a module or parameter below it.

    Raises UserError: none matches; the message has ``key`` of the recipe, and suggests the nearest name.
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


def hidden_matrices(model: OmniModel) -> set[nn.Parameter]:
    """Return the weights of linear layers ``[out, in]``, and of all experts of a layer ``[experts, ...]``.

    Without the language model's head, the decoders, and LoRA adapters. Embeddings, convolutions, routers with a class
    of their own, biases and norms are no linear layers.
    """
    head = model.foundation.get_output_embeddings()
    elsewhere = {model.get_parameter(name) for name in model.adapter_names}
    elsewhere.update(model.foundation.get_input_embeddings().parameters(), head.parameters() if head else ())
    for decoder in model.decoders.values():
        elsewhere.update(decoder.parameters())
    return {parameter for parameter, role in roles_of(model).items() if role == "matrix"} - elsewhere


def freeze(model: OmniModel, names: Sequence[str]) -> None:
    """Freeze parameters, not LoRA adapters, and batch statistics of their modules; UserError: a name matches none."""
    trained = {model.get_parameter(name) for name in (*model.adapter_names, *token_matrices(model))}
    for name in names:
        if name.partition(".")[0] in model.teachers:
            raise UserError(f"model.freeze: {name!r} is of a teacher, which never trains; remove it")
        for parameter in parameters_named(model, name, "model.freeze"):
            parameter.requires_grad_(parameter in trained)
    rest_frozen_statistics(model)
