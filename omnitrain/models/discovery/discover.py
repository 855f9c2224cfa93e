"""Find the components and modality interfaces of an HF multimodal model by tiny runs of its methods."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.discovery.find_interface import find_port
from omnitrain.models.discovery.interface import ModalityInterface, method_name
from omnitrain.models.discovery.model_errors import raise_if_ours
from omnitrain.models.discovery.parameter_reads import leaves
from omnitrain.models.discovery.placeholders import TokenExtras, extra_arguments, marks, video_marks
from omnitrain.models.discovery.positions import PositionFunction, own_function
from omnitrain.models.discovery.probe_inputs import media_arguments
from omnitrain.models.discovery.text_run import (
    MODALITIES,
    called_with,
    eager_attention,
    feature_hosts,
    first_position,
    plain_ids,
    separate_decoder,
    text_arguments,
    undisturbed,
)
from omnitrain.recipe.parallel import FOUNDATION

_DISCOVERED: dict[tuple[type, str], Discovery] = {}


@dataclass(frozen=True)
class Discovery:
    """The components and modalities of a model.

    Attributes:
        interfaces: modality -> how its features are computed and enter the forward.
        components: name -> names of its parameters. ``foundation`` has all parameters that no other component reads,
            and those of the text model that a feature method reads (embeddings of image codes).
        in_forward: modality that only the model's own forward reads -> why its features cannot be computed outside it.
        forward_arguments: arguments that the forward and the feature methods take for a sample, besides its ids.
        refused: modality with a feature method that the forward does not accept -> why.
        positions: computes the position ids of a sample.
        extras: computes the per-token arguments of a sample.
    """

    interfaces: dict[str, ModalityInterface]
    components: dict[str, tuple[str, ...]]
    in_forward: dict[str, str]
    forward_arguments: frozenset[str]
    refused: dict[str, str]
    positions: PositionFunction
    extras: TokenExtras

    @property
    def token_ids(self) -> dict[str, int]:
        """Return modality -> id of its placeholder token."""
        return {modality: interface.token_id for modality, interface in self.interfaces.items()}


def discover(model: PreTrainedModel) -> Discovery:
    """Run every feature method of a model on tiny inputs, and record the parameters it reads and the features it gives.

    The model does not change. It may be on the meta device. A process runs them once for models of one class, config
    and tree of modules. ``model``: a causal language model of transformers, with or without other modalities.
    """
    identity = _identity(model)
    if identity not in _DISCOVERED:
        _DISCOVERED[identity] = _discovered(model)
    return _DISCOVERED[identity]


def _identity(model: PreTrainedModel) -> tuple[type, str]:
    """All that the runs depend on but the values of weights: the class, the config, the modules and the parameters."""
    modules = ((name, type(module)) for name, module in model.named_modules())
    parameters = ((name, p.shape, p.dtype, p.device) for name, p in model.named_parameters())
    tree = repr([model.config.to_json_string(use_diff=False), *modules, *parameters])
    return type(model), hashlib.sha256(tree.encode()).hexdigest()


def _discovered(model: PreTrainedModel) -> Discovery:
    interfaces: dict[str, ModalityInterface] = {}
    in_forward: dict[str, str] = {}
    refused: dict[str, str] = {}
    with undisturbed(model):
        text = _text_parameters(model)
        for modality in MODALITIES:
            interface_or_reason = _interface_or_reason(model, modality)
            if isinstance(interface_or_reason, ModalityInterface):
                interfaces[modality] = interface_or_reason
            elif media_arguments(type(model), modality):
                in_forward[modality] = interface_or_reason
            elif feature_hosts(model, modality):
                refused[modality] = interface_or_reason
        extras = _extras(model, interfaces)
        positions = _positions(model, interfaces, extras)
    grouped = _grouped(model, interfaces, text, positions, extras)
    return replace(grouped, in_forward=in_forward, refused=refused)


def _interface_or_reason(model: PreTrainedModel, modality: str) -> ModalityInterface | str:
    if feature_hosts(model, modality):
        return find_port(model, modality)
    arguments = ", ".join(media_arguments(type(model), modality))
    return f"its forward takes {arguments}, but it has no {method_name(modality)} to compute features"


def _extras(model: PreTrainedModel, interfaces: Mapping[str, ModalityInterface]) -> TokenExtras:
    names = extra_arguments(type(model))
    tokens = {modality: interface.token_id for modality, interface in interfaces.items()}
    extras = TokenExtras(names, tokens, video_marks(model.config, tokens))
    return replace(extras, marks_answer=bool(names) and _zeros_open_the_prompt(model))


def _zeros_open_the_prompt(model: PreTrainedModel) -> bool:
    """Whether, with all types zero, the first token sees the second: then the types tell prompt from answer."""
    with eager_attention(model):
        arguments = _text_call(model)
    masks = [value for value in leaves(arguments) if isinstance(value, Tensor) and value.ndim == 4]
    return any(bool(m[0, 0, 0, 1]) if m.dtype == torch.bool else float(m[0, 0, 0, 1]) == 0.0 for m in masks)


def _text_call(model: PreTrainedModel) -> dict[str, Any]:
    """The arguments that the text decoder gets for ordinary text; empty if the model refuses text."""
    decoder = separate_decoder(model)
    if decoder is None:
        return {}
    try:
        return called_with(model, decoder, text_arguments(model))[1]
    except Exception as error:  # the forward may require an image
        raise_if_ours(error)
        return {}


def _positions(
    model: PreTrainedModel, interfaces: Mapping[str, ModalityInterface], extras: TokenExtras
) -> PositionFunction:
    """The model's position function, or a plain count from its first position."""
    position_ids = _text_call(model).get("position_ids")
    start = int(position_ids.min()) if isinstance(position_ids, Tensor) else _first_position(model)
    if own_function(model) is None:
        return PositionFunction(type(model), None, start=start)
    function = PositionFunction(type(model), model.config.to_json_string(use_diff=False), start=start)
    axes = position_ids.size(0) if isinstance(position_ids, Tensor) and position_ids.ndim == 3 else 0
    for modality in MODALITIES:
        interface = interfaces.get(modality)
        if interface is not None and not axes:
            axes = _axes_with(model, function, interface, extras)
    return replace(function, axes=axes)


def _first_position(model: PreTrainedModel) -> int:
    try:
        return first_position(model)
    except Exception as error:  # as in _text_call
        raise_if_ours(error)
        return 0


def _axes_with(
    model: PreTrainedModel, function: PositionFunction, interface: ModalityInterface, extras: TokenExtras
) -> int:
    plain = plain_ids(model, 4)
    opening, closing = marks(model.config, interface.modality) or (plain[1], plain[2])
    ids = np.array([plain[0], opening, *[interface.token_id] * interface.minimal_rows, closing, plain[3]])
    try:
        positions = function(ids, interface.minimal_input(), extras(ids))
    except UserError:
        return 0
    return positions.shape[0] if positions.ndim == 2 else 0


def _grouped(
    model: PreTrainedModel,
    interfaces: dict[str, ModalityInterface],
    text: set[str],
    positions: PositionFunction,
    extras: TokenExtras,
) -> Discovery:
    """Join modalities whose methods read common parameters into one component, named after the first modality."""
    reads = {
        modality: [name for name in interface.parameters if name not in text]
        for modality, interface in interfaces.items()
    }
    component = _component_of(reads)
    order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    components = {
        name: tuple(sorted({p for m in component if component[m] == name for p in reads[m]}, key=order.__getitem__))
        for name in dict.fromkeys(component.values())
    }
    assigned = {name for names in components.values() for name in names}
    everything = {FOUNDATION: tuple(name for name in order if name not in assigned), **components}
    # A processor cannot know types that tell prompt from answer: they follow from the supervised tokens.
    not_from_processor = {"input_ids", "labels", *(extras.names if extras.marks_answer else ())}
    return Discovery(
        interfaces={
            modality: replace(interface, component=component[modality]) for modality, interface in interfaces.items()
        },
        components=everything,
        in_forward={},
        forward_arguments=frozenset(_taken_by(model)) - not_from_processor,
        refused={},
        positions=positions,
        extras=extras,
    )


def _component_of(reads: Mapping[str, list[str]]) -> dict[str, str]:
    """Modality -> its component: that of the first modality with which it shares parameters, also through others."""
    component: dict[str, str] = {}
    for modality, names in reads.items():
        joined = list(dict.fromkeys(component[other] for other in component if {*reads[other]} & {*names}))
        component[modality] = joined[0] if joined else f"{modality}_encoder"
        component = {other: joined[0] if name in joined else name for other, name in component.items()}
    return component


def _taken_by(model: PreTrainedModel) -> Iterator[str]:
    """Yield the arguments of the forward, and those of feature methods, which it may pass on by ``**kwargs``."""
    functions = [type(model).forward]
    for modality in MODALITIES:
        hosts = [type(model.get_submodule(host)) for host in feature_hosts(model, modality)]
        functions += [inspect.unwrap(getattr(host, method_name(modality))) for host in hosts]
    for function in functions:
        yield from inspect.signature(function).parameters


def _text_parameters(model: PreTrainedModel) -> set[str]:
    """Parameters of the text model: embeddings, head and the decoder, if it is a separate module."""
    modules: list[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if (decoder := separate_decoder(model)) is not None:
        modules.append(decoder)
    ids = {id(parameter) for module in modules if module is not None for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}
