"""Components and ports of a HuggingFace multimodal model, found by tiny runs of its own methods."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
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


@dataclass(frozen=True)
class Discovery:
    """What a model is made of.

    Attributes:
        ports: modality -> how its rows are made and taken.
        components: name -> names of its parameters; ``foundation`` has all that no other component reads, and what a
            feature method reads of the text model (embeddings of image codes).
        in_forward: modality that only the model's own forward reads -> why its rows cannot be made apart from that.
        forward_arguments: what the forward takes of a sample with such a modality beside its ids.
        refused: modality that the model has a feature method for and its forward does not take -> why.
        positions: position ids of a sample.
        extras: per-token arguments of a sample.
    """

    ports: dict[str, ModalityInterface]
    components: dict[str, tuple[str, ...]]
    in_forward: dict[str, str]
    forward_arguments: frozenset[str]
    refused: dict[str, str]
    positions: PositionFunction
    extras: TokenExtras

    @property
    def token_ids(self) -> dict[str, int]:
        """Modality -> id of its placeholder token."""
        return {modality: port.token_id for modality, port in self.ports.items()}


def discover(model: PreTrainedModel) -> Discovery:
    """Run every feature method of a model once on a tiny input, and see what it reads and makes.

    The model is left as it was. It may be on the meta device.

    Args:
        model: a causal language model of transformers, with or without other modalities.
    """
    ports: dict[str, ModalityInterface] = {}
    in_forward: dict[str, str] = {}
    refused: dict[str, str] = {}
    with undisturbed(model):
        text = _text_parameters(model)
        for modality in MODALITIES:
            found, taken = _port_or_why_not(model, modality), media_arguments(type(model), modality)
            if isinstance(found, ModalityInterface):
                ports[modality] = found
            elif taken:
                in_forward[modality] = found
            elif feature_hosts(model, modality):
                refused[modality] = found
        extras = _extras(model, ports)
        positions = _positions(model, ports, extras)
    grouped = _grouped(model, ports, text, positions, extras)
    return replace(grouped, in_forward=in_forward, refused=refused)


def _port_or_why_not(model: PreTrainedModel, modality: str) -> ModalityInterface | str:
    if feature_hosts(model, modality):
        return find_port(model, modality)
    taken = ", ".join(media_arguments(type(model), modality))
    return f"its forward takes {taken}, but no {method_name(modality)} makes rows of it"


def _extras(model: PreTrainedModel, ports: Mapping[str, ModalityInterface]) -> TokenExtras:
    names = extra_arguments(type(model))
    tokens = {modality: port.token_id for modality, port in ports.items()}
    extras = TokenExtras(names, tokens, video_marks(model.config, tokens))
    return replace(extras, marks_answer=bool(names) and _zeros_open_the_prompt(model))


def _zeros_open_the_prompt(model: PreTrainedModel) -> bool:
    """With all types zero, the mask lets the first token see the second: the types tell prompt from answer."""
    with eager_attention(model):
        given = _text_call(model)
    masks = [value for value in leaves(given) if isinstance(value, Tensor) and value.ndim == 4]
    return any(bool(m[0, 0, 0, 1]) if m.dtype == torch.bool else float(m[0, 0, 0, 1]) == 0.0 for m in masks)


def _text_call(model: PreTrainedModel) -> dict[str, Any]:
    """What the text decoder is called with for ordinary text; nothing where the model refuses that."""
    decoder = separate_decoder(model)
    if decoder is None:
        return {}
    try:
        return called_with(model, decoder, text_arguments(model))[1]
    except Exception as error:  # a forward that cannot do without an image
        raise_if_ours(error)
        return {}


def _positions(model: PreTrainedModel, ports: Mapping[str, ModalityInterface], extras: TokenExtras) -> PositionFunction:
    """The model's own function where it has one, and how it counts where it has none."""
    given = _text_call(model).get("position_ids")
    start = int(given.min()) if isinstance(given, Tensor) else _counted_from(model)
    if own_function(model) is None:
        return PositionFunction(type(model), None, start=start)
    function = PositionFunction(type(model), model.config.to_json_string(use_diff=False), start=start)
    axes = given.size(0) if isinstance(given, Tensor) and given.ndim == 3 else 0
    for modality in MODALITIES:
        port = ports.get(modality)
        if port is not None and not axes:
            axes = _axes_with(model, function, port, extras)
    return replace(function, axes=axes)


def _counted_from(model: PreTrainedModel) -> int:
    try:
        return first_position(model)
    except Exception as error:  # as in _text_call
        raise_if_ours(error)
        return 0


def _axes_with(model: PreTrainedModel, function: PositionFunction, port: ModalityInterface, extras: TokenExtras) -> int:
    plain = plain_ids(model, 4)
    opening, closing = marks(model.config, port.modality) or (plain[1], plain[2])
    ids = np.array([plain[0], opening, *[port.token_id] * port.minimal_rows, closing, plain[3]])
    try:
        positions = function(ids, port.minimal_input(), extras(ids))
    except UserError:
        return 0
    return positions.shape[0] if positions.ndim == 2 else 0


def _grouped(
    model: PreTrainedModel,
    ports: dict[str, ModalityInterface],
    text: set[str],
    positions: PositionFunction,
    extras: TokenExtras,
) -> Discovery:
    """Modalities whose methods read common parameters are one component, named after the first of them."""
    owned = {modality: [name for name in port.parameters if name not in text] for modality, port in ports.items()}
    component: dict[str, str] = {}
    for modality, names in owned.items():
        mates = [other for other in component if set(owned[other]) & set(names)]
        component[modality] = component[mates[0]] if mates else f"{modality}_encoder"
        component |= dict.fromkeys(
            (m for m in component if component[m] in {component[o] for o in mates}), component[modality]
        )
    order = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    components = {
        name: tuple(sorted({p for m in component if component[m] == name for p in owned[m]}, key=order.__getitem__))
        for name in dict.fromkeys(component.values())
    }
    taken = {name for names in components.values() for name in names}
    everything = {FOUNDATION: tuple(name for name in order if name not in taken), **components}
    return Discovery(
        ports={modality: replace(port, component=component[modality]) for modality, port in ports.items()},
        components=everything,
        in_forward={},
        forward_arguments=_forward_arguments(model, extras),
        refused={},
        positions=positions,
        extras=extras,
    )


def _forward_arguments(model: PreTrainedModel, extras: TokenExtras) -> frozenset[str]:
    """Types that tell prompt from answer follow from what is trained on, which no processor knows."""
    ours = {"input_ids", "labels", *(extras.names if extras.marks_answer else ())}
    return frozenset(inspect.signature(type(model).forward).parameters) - ours


def _text_parameters(model: PreTrainedModel) -> set[str]:
    """Parameters of the text model: its embeddings, its head and, where it is a module of its own, its decoder."""
    parts: list[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if (decoder := separate_decoder(model)) is not None:
        parts.append(decoder)
    ids = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}
