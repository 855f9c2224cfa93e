"""LoRA: thin trained matrices beside frozen ones. ``peft`` puts them beside linear layers, we beside fused experts."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor, nn

from omnitrain.errors import UserError
from omnitrain.models.components.model import ComponentModel
from omnitrain.ops.experts import (
    add_expert_adapter,
    backend_of,
    experts_in,
    matrix_names,
    merge_expert_adapter,
    parameter_names,
    use_omnitrain_experts,
)
from omnitrain.peers import is_spread
from omnitrain.recipe.globs import matches, unmatched
from omnitrain.recipe.lora import Lora
from omnitrain.recipe.parallel import FOUNDATION

ADAPTER = "default"  # as peft names it
_APPLIED = "_lora_adapters"


@dataclass(frozen=True)
class Adapters:
    """The adapters of a component.

    Attributes:
        rank: of each.
        alpha: ``alpha / rank`` scales them.
        linears: names of linear layers, sorted.
        experts: names of fused experts' matrices, sorted.
    """

    rank: int
    alpha: float
    linears: tuple[str, ...]
    experts: tuple[str, ...]

    @property
    def summary(self) -> str:
        """In a few words, for messages."""
        return f"rank {self.rank}, alpha {self.alpha:g}, {len(self.linears) + len(self.experts)} matrices"


def peft() -> ModuleType:
    """The package.

    Raises:
        UserError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise UserError(f"LoRA needs peft ({error}); pip install 'omnitrain[lora]'") from None
    return peft


def adapters_of(model: ComponentModel) -> dict[str, Adapters]:
    """Component -> its adapters; components without any are left out."""
    return getattr(model, _APPLIED, {})


def adapters_within(model: ComponentModel, adapters: Mapping[str, Adapters]) -> dict[str, Adapters]:
    """Those of ``adapters`` whose matrices ``model`` has: one of fewer layers has fewer."""
    names = {name for name, _ in model.named_parameters()}
    return {
        component: replace(
            own,
            linears=tuple(name for name in own.linears if f"{name}.weight" in names),
            experts=tuple(name for name in own.experts if name in names),
        )
        for component, own in adapters.items()
    }


def without_adapters(model: ComponentModel) -> tuple[dict[str, nn.Module], dict[str, nn.Parameter]]:
    """The modules and parameters of ``model``, tied ones under all names, as they are called without adapters."""
    adapted = {name for own in adapters_of(model).values() for name in own.linears}
    inside = tuple(f"{name}." for name in adapted)
    modules = {
        name: module.get_submodule("base_layer") if name in adapted else module
        for name, module in model.named_modules()
        if not name.startswith(inside)
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return modules, {base: parameters[name] for base, name in names_without_adapters(model, parameters).items()}


def names_without_adapters(model: ComponentModel, names: Iterable[str]) -> dict[str, str]:
    """What parameters ``names`` are called without adapters -> their names; adapters are left out."""
    base_of, added = {own[0]: base for base, own in model.renamed.items()}, model.adapter_names
    return {base_of.get(name, name): name for name in names if name not in added}


def root_of(model: ComponentModel, component: str) -> str:
    """Name of the HF model that the component is, or is a part of."""
    return component if component in (*model.encoder_names, *model.decoder_names) else FOUNDATION


def find_adapters(model: ComponentModel, component: str, lora: Lora) -> Adapters:
    """What the globs of ``lora`` name in the component.

    Raises:
        UserError: a line for each glob that matches nothing, with the nearest one that would.
    """
    return find_in_all(model, [component], lora)[component]


def find_in_all(model: ComponentModel, components: Iterable[str], lora: Lora) -> dict[str, Adapters]:
    """What the globs of ``lora`` name in ``components``; those in which they name nothing are left out.

    Raises:
        UserError: a line for each glob that matches nothing in any of them.
    """
    candidates = {component: _candidates(model, component) for component in components}
    every = [name for linears, experts in candidates.values() for name in (*linears, *experts)]
    if problems := [unmatched(g, every) for g in lora.targets if not any(matches(g, name) for name in every)]:
        raise UserError("\n".join(problems))
    found = {name: _chosen(lora, *own) for name, own in candidates.items()}
    return {name: own for name, own in found.items() if own.linears or own.experts}


def _chosen(lora: Lora, linears: Iterable[str], experts: Iterable[str]) -> Adapters:
    taken = [[n for n in names if any(matches(g, n) for g in lora.targets)] for names in (linears, experts)]
    return Adapters(lora.rank, lora.alpha, *(tuple(sorted(names)) for names in taken))


def _candidates(model: ComponentModel, component: str) -> tuple[list[str], list[str]]:
    """Linear layers and matrices of experts. Not the output head: the loss reads its weight, and calls no module.

    Nor decoders' layers: their media tokenizers run without gradients, and their heads are read by the loss.
    """
    if component in model.decoder_names:
        return [], []
    own = model.components[component]
    head = model.foundation.get_output_embeddings()
    adapted = {name for adapters in adapters_of(model).values() for name in adapters.linears}
    inside = tuple(f"{name}." for name in adapted)
    linears = [
        name
        for name, module in model.named_modules()
        # Kinds of linear layers of others' making may compute without calling themselves.
        if (name in adapted or (type(module) is nn.Linear and module is not head and not name.startswith(inside)))
        and model.renamed.get(f"{name}.weight", (f"{name}.weight",))[0] in own
    ]
    matrices = (f"{name}.{weight}" for name, module in experts_in(model) for weight in matrix_names(module))
    return linears, [name for name in matrices if name in own]


def add_lora(model: ComponentModel, adapters: Mapping[str, Adapters]) -> None:
    """Freeze components and put adapters into them, which change nothing before they are trained (``B`` is zero).

    ``A`` is drawn as peft does, from the parameter's name: it is the same on all ranks and in all runs.

    Args:
        model: not laid out yet; changed in place.
        adapters: component -> adapters. One that has the same already is left as it is.

    Raises:
        UserError: peft is missing, or a component has other adapters already.
    """
    present = adapters_of(model)
    new = {name: own for name, own in adapters.items() if present.get(name) != own}
    if not new:
        return
    if taken := sorted(new.keys() & present.keys()):
        raise UserError(f"{taken[0]} has LoRA adapters already, of other targets, rank or alpha; build a new model")
    peft()
    # Before any is added: a model finds out its foundation's components by measurements without adapters.
    own = {name: model.components[name] for name in new}
    for parameters in own.values():
        for parameter in parameters.values():
            parameter.requires_grad_(False)
    for name, wanted in new.items():
        _add_to_linears(model, wanted)
        _add_to_experts(model, wanted)
        _draw(model, [path for base in own[name] for path in model.renamed.get(base, (base,))[1:]])
    setattr(model, _APPLIED, {**present, **new})


@torch.no_grad()
def merge_lora(model: ComponentModel, dtype: torch.dtype | None = None) -> None:
    """Make ``W + alpha / rank * B A`` of every adapted matrix ``W``, and remove the adapters.

    The model computes what it did, up to one rounding of each of these matrices. Parameters are called as they were
    without adapters, and stay frozen.

    Args:
        model: not laid out; changed in place. One without adapters stays as it is.
        dtype: of merged matrices, where the caller casts the rest to it, too; None: each keeps its own. The sum is made
            in fp32 and rounded once.

    Raises:
        UserError: the model is laid out over ranks, or none of ours, or an adapted matrix is tied to another one, which
            has no adapter.
    """
    if not hasattr(model, "renamed"):
        raise UserError(
            f"merge_lora: found a {type(model).__name__}; expected an OmniModel, as build_omni_model returns it"
        )
    if is_spread(model):
        raise UserError(
            "merge_lora: the model is laid out over ranks; save it, and merge what build_omni_model(weights_path=...) "
            "makes of the folder"
        )
    names = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for base, (path, *_) in model.renamed.items():
        if names[model.get_parameter(path)] > 1:
            raise UserError(f"merge_lora: {base} is tied to another matrix, which its adapter would change, too")
    for adapters in adapters_of(model).values():
        for name in adapters.linears:
            layer = model.get_submodule(name)
            linear = layer.get_submodule("base_layer")
            merged = linear.weight.float() + layer.get_delta_weight(ADAPTER)
            linear.weight.data = merged.to(dtype or linear.weight.dtype)
            model.set_submodule(name, linear)
        for path in adapters.experts:
            owner, _, weight = path.rpartition(".")
            merge_expert_adapter(model.get_submodule(owner), weight, dtype)
    model.renamed.clear()
    setattr(model, _APPLIED, {})


def _add_to_linears(model: ComponentModel, adapters: Adapters) -> None:
    if not adapters.linears:
        return
    trains = {parameter for parameter in model.parameters() if parameter.requires_grad}
    config = peft().LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=list(adapters.linears))
    # In a shell, so that peft sees no model of transformers: of some it would take other layers than were named.
    peft().inject_adapter_in_model(config, _Shell(model), ADAPTER)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trains)
    for name in adapters.linears:
        thin = (f"{name}.lora_{matrix}.{ADAPTER}.weight" for matrix in "AB")
        model.renamed[f"{name}.weight"] = (f"{name}.base_layer.weight", *thin)
        if model.get_submodule(f"{name}.base_layer").bias is not None:
            model.renamed[f"{name}.bias"] = (f"{name}.base_layer.bias",)


class _Shell(nn.Module):
    """A model as the only thing in it, under names that are those of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)


def _add_to_experts(model: ComponentModel, adapters: Adapters) -> None:
    for path in adapters.experts:
        owner, _, weight = path.rpartition(".")
        module = model.get_submodule(owner)
        add_expert_adapter(module, weight, adapters.rank, adapters.alpha / adapters.rank)
        use_omnitrain_experts(module, backend_of(module))
        model.renamed[path] = (path, *(f"{owner}.{name}" for name in parameter_names(weight)))


@torch.no_grad()
def _draw(model: ComponentModel, paths: Collection[str]) -> None:
    """Adapters train, in fp32. ``A``: uniform as ``kaiming_uniform_(a=sqrt(5))``; ``B``: zeros."""
    for first, second in zip(*[iter(paths)] * 2, strict=True):
        a, b = model.get_parameter(first), model.get_parameter(second)
        for parameter in (a, b):
            parameter.data = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.requires_grad_()
        if not a.is_meta:
            bound = a.size(-1) ** -0.5
            drawn: Tensor = torch.empty(a.shape).uniform_(-bound, bound, generator=_generator(first))
            a.copy_(drawn)


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))
