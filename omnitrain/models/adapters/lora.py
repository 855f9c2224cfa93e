"""LoRA: trained low-rank matrices next to frozen ones; ``peft`` adapts linear layers, omnitrain fused experts."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omnitrain.errors import UserError
from omnitrain.models.components.model import ComponentModel
from omnitrain.ops.experts.install import backend_of, use_omnitrain_experts
from omnitrain.ops.experts.lora import add_expert_adapter, merge_expert_adapter, parameter_names
from omnitrain.ops.experts.weights import experts_in, matrix_names
from omnitrain.optim.adamw import local_shard
from omnitrain.packages import install_command
from omnitrain.peers import is_spread
from omnitrain.recipe.globs import matches, unmatched
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.recipe.plan_groups import ALL_LINEAR, Lora
from omnitrain.torch_private import part_of_rank

ADAPTER = "default"  # as peft names it
_APPLIED = "_lora_adapters"
_ROWS = "_rows_that_train"  # of a parameter with a hook for them


@dataclass(frozen=True)
class Adapters:
    """The adapters of a component."""

    rank: int  # rank of each adapter
    alpha: float  # adapters are scaled by ``alpha / rank``
    linears: tuple[str, ...]  # names of adapted linear layers, sorted
    experts: tuple[str, ...]  # names of adapted matrices of fused experts, sorted
    rslora: bool = False  # adapters are scaled by ``alpha / sqrt(rank)`` instead
    dropout: float = 0.0  # probability of dropping an input of ``A`` in training; of linear layers
    tokens: tuple[int, ...] = ()  # ids of the tokens whose rows of the foundation's embeddings train, too, sorted

    @property
    def summary(self) -> str:
        """A short description, for messages."""
        more = ", rslora" * self.rslora + f", dropout {self.dropout:g}" * bool(self.dropout)
        more += f", {len(self.tokens)} tokens" * bool(self.tokens)
        return f"rank {self.rank}, alpha {self.alpha:g}, {len(self.linears) + len(self.experts)} matrices{more}"

    @property
    def scale(self) -> float:
        """Factor on ``B A``."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def peft() -> ModuleType:
    """Import and return the package ``peft``. Raises UserError: peft is not installed."""
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
        for part in ("tower", "projector"):
            linears, experts = (
                tuple(name for name in names if name.startswith(f"{encoder}.tower.") == (part == "tower"))
                for names in (whole.linears, whole.experts)
            )
            if linears or experts:
                found[f"{encoder}.{part}"] = replace(whole, linears=linears, experts=experts)
    return found


def adapters_within(model: ComponentModel, adapters: Mapping[str, Adapters]) -> dict[str, Adapters]:
    """Return ``adapters`` without matrices that ``model``, with fewer layers or experts, does not have."""
    names = {name for name, _ in model.named_parameters()}
    return {
        component: replace(
            each,
            linears=tuple(name for name in each.linears if f"{name}.weight" in names),
            experts=tuple(name for name in each.experts if name in names),
            tokens=(),  # the tiny model has other ids
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
    """Find the layers of a component that the globs of ``lora`` match; a glob that matches nothing raises UserError."""
    return find_in_all(model, [component], lora)[component]


def find_in_all(model: ComponentModel, components: Iterable[str], lora: Lora) -> dict[str, Adapters]:
    """Find the layers that the globs match, by component; raise UserError if a glob matches in no component."""
    candidates = {component: _candidates(model, component) for component in components}
    every = [name for linears, experts in candidates.values() for name in (*linears, *experts)]
    all_linear = lora.targets == ALL_LINEAR
    globs = ["*"] if lora.targets == ALL_LINEAR else lora.targets
    if problems := [unmatched(g, every) for g in globs if not any(matches(g, name) for name in every)]:
        raise UserError(*problems)

    def matching(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(name for name in names if any(matches(glob, name) for glob in globs)))

    found = {}
    for name, (linears, experts) in candidates.items():
        tokens = model.added_tokens if name == FOUNDATION else ()
        names = matching(linears), () if all_linear else matching(experts)
        if any(names):
            found[name] = Adapters(lora.rank, lora.alpha, *names, lora.rslora, lora.dropout, tokens)
    return found


def _candidates(model: ComponentModel, component: str) -> tuple[list[str], list[str]]:
    """Linear layers and expert matrices that can get adapters: none of heads and media tokenizers."""
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

    ``A`` has peft's distribution, equal on all ranks and in all runs. ``model`` is not parallelized yet. Raises
    UserError: peft is missing, or a component already has other adapters.
    """
    present = adapters_of(model)
    new = {name: each for name, each in adapters.items() if present.get(name) != each}
    if not new:
        return
    if taken := sorted(new.keys() & present.keys()):
        raise UserError(
            f"{taken[0]} already has other LoRA adapters ({present[taken[0]].summary}) than the new ones "
            f"({new[taken[0]].summary}); build a new model"
        )
    peft()
    # Read the components first: the model finds the foundation's components by runs without adapters.
    frozen = {name: model.components[name] for name in new}
    for parameters in frozen.values():
        for parameter in parameters.values():
            parameter.requires_grad_(False)
    for name, each in new.items():
        _add_to_linears(model, each)
        _add_to_experts(model, each)
        _draw(model, [path for base in frozen[name] for path in model.renamed.get(base, (base,))[1:]])
    setattr(model, _APPLIED, {**present, **new})
    if FOUNDATION in new:
        model.added_tokens = new[FOUNDATION].tokens
    train_rows(model)
    model.find_draws()


def token_matrices(model: ComponentModel) -> dict[str, tuple[int, ...]]:
    """Return parameter -> its rows that train beside adapters: the foundation's embedding, and its head if not tied."""
    adapters = adapters_of(model).get(FOUNDATION)
    if adapters is None or not adapters.tokens:
        return {}
    ends = (model.foundation.get_input_embeddings(), model.foundation.get_output_embeddings())
    weights = {id(end.weight) for end in ends}
    return {name: adapters.tokens for name, weight in model.named_parameters() if id(weight) in weights}


def train_rows(model: ComponentModel) -> None:
    """Let only the rows of added tokens train, without weight decay; call it again when parameters were replaced."""
    for name, rows in token_matrices(model).items():
        parameter = model.get_parameter(name)
        parameter.requires_grad_()
        if not parameter.is_meta and not hasattr(parameter, _ROWS):
            setattr(parameter, _ROWS, rows)
            parameter.register_post_accumulate_grad_hook(partial(_zero_other_rows, rows))


def _zero_other_rows(rows: Collection[int], parameter: Tensor) -> None:
    """Leave only some rows of a gradient, sharded or not."""
    assert parameter.grad is not None
    local, first = local_shard(parameter.grad), 0
    if isinstance(parameter.grad, DTensor):
        mesh, placements = parameter.grad.device_mesh, parameter.grad.placements
        first = part_of_rank(parameter.grad.shape, mesh, placements)[1][0]
    own = sorted(row - first for row in rows if 0 <= row - first < local.size(0))
    for before, after in pairwise([-1, *own, local.size(0)]):
        if after - before > 1:
            local[before + 1 : after].zero_()  # by a list of rows, the host would wait for the device


@torch.no_grad()
def merge_lora(model: ComponentModel, dtype: torch.dtype | None = None) -> None:
    """Replace every adapted matrix ``W`` by ``W + alpha / rank * B A``, in place, and remove the adapters.

    Outputs stay the same up to one rounding of each matrix, from fp32 to ``dtype`` (None: its own). Parameters get
    their names without adapters, and stay frozen. Raises UserError: the model is parallelized, or no omnitrain model,
    or an adapted matrix is tied to another matrix.
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
    for name in token_matrices(model):
        model.get_parameter(name).requires_grad_(False)
    setattr(model, _APPLIED, {})


def _add_to_linears(model: ComponentModel, adapters: Adapters) -> None:
    if not adapters.linears:
        return
    trains = {parameter for parameter in model.parameters() if parameter.requires_grad}
    config = peft().LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,
        use_rslora=adapters.rslora,
        lora_dropout=adapters.dropout,
        target_modules=list(adapters.linears),
    )
    # In a shell, so that peft does not recognize the HF model: for some models it would choose other layers.
    peft().inject_adapter_in_model(config, nn.ModuleDict(dict(model.named_children())), ADAPTER)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trains)
    for name in adapters.linears:
        added = (f"{name}.lora_{matrix}.{ADAPTER}.weight" for matrix in "AB")
        model.renamed[f"{name}.weight"] = (f"{name}.base_layer.weight", *added)
        if model.get_submodule(f"{name}.base_layer").bias is not None:
            model.renamed[f"{name}.bias"] = (f"{name}.base_layer.bias",)


def _add_to_experts(model: ComponentModel, adapters: Adapters) -> None:
    for path in adapters.experts:
        owner, _, weight = path.rpartition(".")
        module = model.get_submodule(owner)
        add_expert_adapter(module, weight, adapters.rank, adapters.scale)
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
