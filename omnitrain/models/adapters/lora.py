"""LoRA: trained low-rank matrices next to frozen ones; ``peft`` adapts linear layers, omnitrain fused experts."""

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
from omnitrain.packages import install_command
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
        rank: rank of each adapter.
        alpha: adapters are scaled by ``alpha / rank``.
        linears: names of adapted linear layers, sorted.
        experts: names of adapted matrices of fused experts, sorted.
    """

    rank: int
    alpha: float
    linears: tuple[str, ...]
    experts: tuple[str, ...]

    @property
    def summary(self) -> str:
        """A short description, for messages."""
        return f"rank {self.rank}, alpha {self.alpha:g}, {len(self.linears) + len(self.experts)} matrices"


def peft() -> ModuleType:
    """Import and return the package ``peft``.

    Raises:
        UserError: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise UserError(f"LoRA needs peft ({error}); {install_command('lora')}") from None
    return peft


def adapters_of(model: ComponentModel) -> dict[str, Adapters]:
    """Return component -> its adapters, for components with adapters."""
    found = dict[str, Adapters](getattr(model, _APPLIED, {}))
    for encoder in (name for name in model.divided if name in found):
        whole = found.pop(encoder)
        for part, is_tower in ((f"{encoder}.tower", True), (f"{encoder}.projector", False)):
            linears, experts = (
                tuple(name for name in names if name.startswith(f"{encoder}.tower.") == is_tower)
                for names in (whole.linears, whole.experts)
            )
            if linears or experts:
                found[part] = replace(whole, linears=linears, experts=experts)
    return found


def adapters_within(model: ComponentModel, adapters: Mapping[str, Adapters]) -> dict[str, Adapters]:
    """Return ``adapters`` without those of matrices that ``model`` does not have, such as with fewer layers."""
    names = {name for name, _ in model.named_parameters()}
    return {
        component: replace(
            each,
            linears=tuple(name for name in each.linears if f"{name}.weight" in names),
            experts=tuple(name for name in each.experts if name in names),
        )
        for component, each in adapters.items()
    }


def without_adapters(model: ComponentModel) -> tuple[dict[str, nn.Module], dict[str, nn.Parameter]]:
    """Return the modules and parameters by their names without adapters; tied ones have all their names."""
    adapted = {name for each in adapters_of(model).values() for name in each.linears}
    inside = tuple(f"{name}." for name in adapted)
    modules = {
        name: module.get_submodule("base_layer") if name in adapted else module
        for name, module in model.named_modules()
        if not name.startswith(inside)
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return modules, {base: parameters[name] for base, name in names_without_adapters(model, parameters).items()}


def names_without_adapters(model: ComponentModel, names: Iterable[str]) -> dict[str, str]:
    """Return name without adapters -> name, for the parameters ``names`` except adapters."""
    base_of, added = {renamed[0]: base for base, renamed in model.renamed.items()}, model.adapter_names
    return {base_of.get(name, name): name for name in names if name not in added}


def root_of(model: ComponentModel, component: str) -> str:
    """Return the name of the HF model that is the component or contains it."""
    attached = component.partition(".")[0]
    return attached if attached in (*model.encoder_names, *model.decoder_names) else FOUNDATION


def find_adapters(model: ComponentModel, component: str, lora: Lora) -> Adapters:
    """Find the layers of the component that the globs of ``lora`` match.

    Raises:
        UserError: one line per glob that matches nothing, with the nearest name that exists.
    """
    return find_in_all(model, [component], lora)[component]


def find_in_all(model: ComponentModel, components: Iterable[str], lora: Lora) -> dict[str, Adapters]:
    """Find the layers of ``components`` that the globs of ``lora`` match; components without a match are omitted.

    Raises:
        UserError: one line per glob that matches nothing in any component.
    """
    candidates = {component: _candidates(model, component) for component in components}
    every = [name for linears, experts in candidates.values() for name in (*linears, *experts)]
    if problems := [unmatched(g, every) for g in lora.targets if not any(matches(g, name) for name in every)]:
        raise UserError(*problems)

    def matching(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(name for name in names if any(matches(glob, name) for glob in lora.targets)))

    adapters = {
        name: Adapters(lora.rank, lora.alpha, matching(linears), matching(experts))
        for name, (linears, experts) in candidates.items()
    }
    return {name: each for name, each in adapters.items() if each.linears or each.experts}


def _candidates(model: ComponentModel, component: str) -> tuple[list[str], list[str]]:
    """Linear layers and matrices of experts that can get adapters.

    The loss reads the weights of the output head and of decoders' heads without calling the module, and media
    tokenizers run without gradients, so these are excluded.
    """
    if component in model.decoder_names:
        return [], []
    parameters = model.components[component]
    head = model.foundation.get_output_embeddings()
    adapted = {name for adapters in adapters_of(model).values() for name in adapters.linears}
    inside = tuple(f"{name}." for name in adapted)
    linears = [
        name
        for name, module in model.named_modules()
        # Subclasses of Linear may use their weight without calling the module.
        if (name in adapted or (type(module) is nn.Linear and module is not head and not name.startswith(inside)))
        and model.renamed.get(f"{name}.weight", (f"{name}.weight",))[0] in parameters
    ]
    matrices = (f"{name}.{weight}" for name, module in experts_in(model) for weight in matrix_names(module))
    return linears, [name for name in matrices if name in parameters]


def add_lora(model: ComponentModel, adapters: Mapping[str, Adapters]) -> None:
    """Freeze components and add adapters to them; the outputs do not change before training (``B`` is zero).

    ``A`` has peft's distribution, with a seed from the parameter's name: it is the same on all ranks and in all runs.

    Args:
        model: not parallelized yet; changed in place.
        adapters: component -> adapters. A component that already has the same adapters does not change.

    Raises:
        UserError: peft is missing, or a component already has other adapters.
    """
    present = adapters_of(model)
    new = {name: each for name, each in adapters.items() if present.get(name) != each}
    if not new:
        return
    if taken := sorted(new.keys() & present.keys()):
        raise UserError(f"{taken[0]} already has LoRA adapters with other targets, rank or alpha; build a new model")
    peft()
    # Read the components first: the model finds those of its foundation by runs without adapters.
    frozen = {name: model.components[name] for name in new}
    for parameters in frozen.values():
        for parameter in parameters.values():
            parameter.requires_grad_(False)
    for name, each in new.items():
        _add_to_linears(model, each)
        _add_to_experts(model, each)
        _draw(model, [path for base in frozen[name] for path in model.renamed.get(base, (base,))[1:]])
    setattr(model, _APPLIED, {**present, **new})


@torch.no_grad()
def merge_lora(model: ComponentModel, dtype: torch.dtype | None = None) -> None:
    """Replace every adapted matrix ``W`` by ``W + alpha / rank * B A``, and remove the adapters.

    Outputs stay the same up to one rounding of each of these matrices. Parameters get their names without adapters, and
    stay frozen.

    Args:
        model: not parallelized; changed in place. A model without adapters does not change.
        dtype: dtype of the merged matrices, if the caller casts all others to it, too; None: each keeps its dtype. The
            sum is computed in fp32 and rounded once.

    Raises:
        UserError: the model is parallelized, or no omnitrain model, or an adapted matrix is tied to another matrix.
    """
    if not hasattr(model, "renamed"):
        raise UserError(
            f"merge_lora: found a {type(model).__name__}; expected an OmniModel, as build_omni_model returns it"
        )
    if is_spread(model):
        raise UserError(
            "merge_lora: the model is parallelized; save it, load it with build_omni_model(weights_path=...), and "
            "merge that model"
        )
    names = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for base, (path, *_) in model.renamed.items():
        if names[model.get_parameter(path)] > 1:
            raise UserError(f"merge_lora: {base} is tied to another matrix, and merging would change that matrix, too")
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
    # In a shell, so that peft does not recognize the HF model: for some models it would choose other layers.
    peft().inject_adapter_in_model(config, _Shell(model), ADAPTER)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trains)
    for name in adapters.linears:
        added = (f"{name}.lora_{matrix}.{ADAPTER}.weight" for matrix in "AB")
        model.renamed[f"{name}.weight"] = (f"{name}.base_layer.weight", *added)
        if model.get_submodule(f"{name}.base_layer").bias is not None:
            model.renamed[f"{name}.bias"] = (f"{name}.base_layer.bias",)


class _Shell(nn.Module):
    """A plain module with the children of a model, under the same names."""

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
    """Initialize adapters in fp32 and let them train. ``A``: as ``kaiming_uniform_(a=sqrt(5))``; ``B``: zeros."""
    for first, second in zip(*[iter(paths)] * 2, strict=True):
        a, b = model.get_parameter(first), model.get_parameter(second)
        for parameter in (a, b):
            parameter.data = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.requires_grad_()
        if not a.is_meta:
            bound = a.size(-1) ** -0.5
            generator = torch.Generator().manual_seed(zlib.crc32(first.encode()))
            drawn: Tensor = torch.empty(a.shape).uniform_(-bound, bound, generator=generator)
            a.copy_(drawn)
