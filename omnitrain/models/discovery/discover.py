"""Find the components and modality interfaces of an HF multimodal model by tiny runs of its methods."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from omnitrain.data.packing.sample import Features, Grid
from omnitrain.data.render.native import NativeInputs
from omnitrain.errors import UserError
from omnitrain.models.discovery.find_interface import InterfaceSearch
from omnitrain.models.discovery.geometry import config_nodes, vision_sizes
from omnitrain.models.discovery.interface import ModalityInterface, method_name
from omnitrain.models.discovery.model_errors import suppress_errors_of_models
from omnitrain.models.discovery.placeholders import TokenExtras, extra_arguments, marks, special_ids, video_marks
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
from omnitrain.torch_private import tree_iter

METHODS = ("compute_3d_position_ids", "get_rope_index")
"""Names of the methods with which models compute positions of media, the likeliest first."""

_GRID = "image_grid_thw"  # argument with the patches of images: frames, rows, columns
_Array: TypeAlias = np.ndarray[Any, Any]
_ALIASES = (
    ("second_per_grid_ts", "second_per_grids", "video_second_per_grid"),
    ("audio_seqlens", "audio_feature_lengths"),
)
_LENGTH_MASKS = ("feature_attention_mask", "input_features_mask")
_DEPTHS = ("num_hidden_layers", "depth", "encoder_layers", "num_layers")


@dataclass(frozen=True)
class PositionFunction:
    """Computes the position ids of one sample as the model would, by an instance without weights; can be pickled."""

    model: type[PreTrainedModel]  # class of the model
    config: str | None  # its config as JSON (with ``model_type``); None: positions are a plain count
    axes: int = 0  # number of rows of the result; 0: the result is ``[T]``
    start: int = 0  # first position

    def __call__(self, ids: _Array, features: Mapping[str, Any], extras: Mapping[str, _Array]) -> _Array:
        """Return the position ids of one sample, ``[axes, T]`` or ``[T]``, int64; UserError: refused media.

        ``ids``: ``[T]``. ``features``: the forward's media arguments of this sample alone (grids, lengths, masks, ...),
        numpy or torch. ``extras``: its per-token arguments, of ``TokenExtras``.
        """
        plain = np.arange(self.start, self.start + ids.size, dtype=np.int64)
        if self.config is None:
            return plain
        positions = self._own(torch.from_numpy(np.asarray(ids, dtype=np.int64))[None], features, extras)
        if positions is None:
            return np.broadcast_to(plain, (self.axes, ids.size)).copy() if self.axes else plain
        return positions.reshape(*positions.shape[:-2], ids.size).numpy().astype(np.int64)

    def _own(self, ids: Tensor, features: Mapping[str, Any], extras: Mapping[str, _Array]) -> Tensor | None:
        assert self.config is not None
        function = _function(cast(Hashable, self.model), self.config)
        known = {name: torch.as_tensor(value) for name, value in features.items() if value is not None}
        known |= {name: torch.as_tensor(value)[None] for name, value in extras.items()}
        known |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "inputs_embeds": torch.empty(*ids.shape, 1)}
        arguments: dict[str, Tensor | None] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            value = _named(name, known)
            if value is not None:
                arguments[name] = value
            elif parameter.default is inspect.Parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                arguments[name] = None
        try:
            result = function(**arguments)
        except (StopIteration, RuntimeError, IndexError, ValueError, TypeError) as error:
            raise UserError(
                f"{self.model.__name__} cannot compute positions for this sample's media "
                f"({type(error).__name__}: {error}); it got {', '.join(sorted(features)) or 'none'}"
            ) from error
        return result[0] if isinstance(result, tuple) else result


def own_function(model: PreTrainedModel) -> Any:
    """Return the model's method that computes positions of media, or None."""
    methods = ((module, name) for name in METHODS for module in model.modules() if hasattr(type(module), name))
    return next((getattr(module, name) for module, name in methods), None)


@functools.lru_cache(maxsize=4)
def _function(model: Any, config: str) -> Any:
    values = json.loads(config)
    full = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        try:
            instance = model(_shallow(full))
        except Exception:  # some models require the full depth
            instance = model(copy.deepcopy(full))
    return own_function(instance)


def _shallow(config: PreTrainedConfig) -> PreTrainedConfig:
    """Reduce all towers and decoders to one layer: positions do not depend on depth, and it builds ten times faster."""
    config = copy.deepcopy(config)
    for node in config_nodes(config):
        for name in _DEPTHS:
            if isinstance(getattr(node, name, None), int):
                setattr(node, name, 1)
        if isinstance(getattr(node, "layer_types", None), list):
            node.layer_types = node.layer_types[:1]
    return config


def _named(name: str, known: Mapping[str, Tensor]) -> Tensor | None:
    """The value of a parameter: by its name, by an alias, or as the lengths of a mask."""
    names = [name, *(other for alias in _ALIASES if name in alias for other in alias)]
    masks = [known[mask] for mask in _LENGTH_MASKS if mask in known and name in _ALIASES[1]]
    values = (known[candidate] for candidate in names if candidate in known)
    return next(values, masks[0].sum(-1).long() if masks else None)


_DISCOVERED: dict[tuple[type, str], Discovery] = {}


@dataclass(frozen=True)
class Discovery:
    """The components and modalities of a model."""

    interfaces: dict[str, ModalityInterface]  # modality -> how its features are computed and enter the forward
    # name -> names of its parameters. ``foundation`` has all parameters that no other component reads, and those
    # parameters of the text model that a feature method reads (embeddings of image codes).
    components: dict[str, tuple[str, ...]]
    in_forward: dict[str, str]  # modality that only the model's own forward reads -> why it cannot be read outside
    forward_arguments: frozenset[str]  # that the forward and the feature methods take for a sample, besides its ids
    refused: dict[str, str]  # modality with a feature method that the forward does not accept -> why
    positions: PositionFunction  # computes the position ids of a sample
    extras: TokenExtras  # computes the per-token arguments of a sample

    @property
    def token_ids(self) -> dict[str, int]:
        """Return modality -> id of its placeholder token."""
        return {modality: interface.token_id for modality, interface in self.interfaces.items()}


def rest_codecs(model: nn.Module, discovery: Discovery) -> None:
    """Freeze media tokenizers whose codes are words, in evaluation mode: codes have no gradient."""
    owners = {each.component for each in discovery.interfaces.values() if each.are_words}
    owned = {path for component in owners for path in discovery.components[component]}
    for name, module in model.named_modules() if owned else ():
        if owned.issuperset(path for path, _ in module.named_parameters(prefix=name)):
            module.eval().requires_grad_(False)


def discover(model: PreTrainedModel) -> Discovery:
    """Find what a model's feature methods read and give by tiny inputs, once per class, config and modules."""
    modules = ((name, type(module)) for name, module in model.named_modules())
    parameters = ((name, p.shape, p.dtype, p.device) for name, p in model.named_parameters())
    tree = repr([model.config.to_json_string(use_diff=False), *modules, *parameters])
    identity = type(model), hashlib.sha256(tree.encode()).hexdigest()
    if identity not in _DISCOVERED:
        _DISCOVERED[identity] = _discovered(model)
    return _DISCOVERED[identity]


def _discovered(model: PreTrainedModel) -> Discovery:
    with undisturbed(model):
        text = _text_parameters(model)
        found = {modality: _interface_or_reason(model, modality) for modality in MODALITIES}
        interfaces = {m: interface for m, interface in found.items() if isinstance(interface, ModalityInterface)}
        reasons = {modality: reason for modality, reason in found.items() if isinstance(reason, str)}
        extras = _extras(model, interfaces)
        positions = _positions(model, interfaces, extras)
    component, components = _components(model, interfaces, text)
    in_forward = {m: reason for m, reason in reasons.items() if media_arguments(type(model), m)}
    # A processor cannot know types that tell prompt from answer: they follow from the supervised tokens.
    not_from_processor = {"input_ids", "labels", *(extras.names if extras.marks_answer else ())}
    return Discovery(
        interfaces={modality: replace(each, component=component[modality]) for modality, each in interfaces.items()},
        components=components,
        in_forward=in_forward,
        forward_arguments=frozenset(_taken_by(model)) - not_from_processor,
        refused={m: why for m, why in reasons.items() if m not in in_forward and feature_hosts(model, m)},
        positions=positions,
        extras=extras,
    )


def _interface_or_reason(model: PreTrainedModel, modality: str) -> ModalityInterface | str:
    if feature_hosts(model, modality):
        return InterfaceSearch(model, modality).find()
    arguments = ", ".join(media_arguments(type(model), modality))
    return f"its forward takes {arguments}, but it has no {method_name(modality)} to compute features"


def _extras(model: PreTrainedModel, interfaces: Mapping[str, ModalityInterface]) -> TokenExtras:
    """Types tell prompt from answer if, with all of them zero, the first token sees the second."""
    names = extra_arguments(type(model))
    tokens = {modality: interface.token_id for modality, interface in interfaces.items()}
    with eager_attention(model):
        arguments = _text_call(model) if names else {}
    masks = [value for value in tree_iter(arguments) if isinstance(value, Tensor) and value.ndim == 4]
    sees = [bool(m[0, 0, 0, 1]) if m.dtype == torch.bool else float(m[0, 0, 0, 1]) == 0.0 for m in masks]
    return TokenExtras(names, tokens, video_marks(model.config, tokens), any(sees))


def _text_call(model: PreTrainedModel) -> dict[str, Any]:
    decoder = separate_decoder(model)
    if decoder is None:
        return {}
    arguments: dict[str, Any] = {}
    with suppress_errors_of_models():  # the forward may require an image
        arguments.update(called_with(model, decoder, text_arguments(model))[1])
    return arguments


def _positions(
    model: PreTrainedModel, interfaces: Mapping[str, ModalityInterface], extras: TokenExtras
) -> PositionFunction:
    """The model's position function, or a plain count from its first position."""
    position_ids = _text_call(model).get("position_ids")
    start = 0
    with suppress_errors_of_models():
        start = int(position_ids.min()) if isinstance(position_ids, Tensor) else first_position(model)
    if own_function(model) is None:
        return PositionFunction(type(model), None, start=start)
    function = PositionFunction(type(model), model.config.to_json_string(use_diff=False), start=start)
    axes = position_ids.size(0) if isinstance(position_ids, Tensor) and position_ids.ndim == 3 else 0
    for interface in interfaces.values():
        axes = axes or _axes_with(model, function, interface, extras)
    return replace(function, axes=axes)


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


def _components(
    model: PreTrainedModel, interfaces: Mapping[str, ModalityInterface], text: set[str]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Modality -> its component, shared with the first modality that reads its parameters; component -> parameters."""
    reads = {modality: set(interface.parameters) - text for modality, interface in interfaces.items()}
    component: dict[str, str] = {}
    for modality, names in reads.items():
        joined = list(dict.fromkeys(component[other] for other in component if reads[other] & names))
        component[modality] = joined[0] if joined else f"{modality}_encoder"
        component = {other: joined[0] if name in joined else name for other, name in component.items()}
    owner = {path: name for modality, name in component.items() for path in reads[modality]}
    components: dict[str, list[str]] = {name: [] for name in (FOUNDATION, *component.values())}
    for path, _ in model.named_parameters():
        components[owner.get(path, FOUNDATION)].append(path)
    return component, {name: tuple(paths) for name, paths in components.items()}


def _taken_by(model: PreTrainedModel) -> Iterator[str]:
    """Yield the arguments of the forward, and of feature methods, to which it may pass ``**kwargs``."""
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


def native_inputs(discovery: Discovery) -> NativeInputs:
    """Return placeholders, per-token arguments and positions of a foundation for data workers (picklable)."""
    return NativeInputs(
        placeholders=discovery.token_ids,
        token_inputs=discovery.extras.names,
        positions=SamplePositions(discovery.positions),
        grid_positions=_grid_positions(discovery),
        token_types=discovery.extras,
        in_forward=frozenset(discovery.in_forward),
        forward_arguments=discovery.forward_arguments,
        refused=discovery.refused,
        media_arguments={modality: interface.arguments for modality, interface in discovery.interfaces.items()},
        written=frozenset(modality for modality, interface in discovery.interfaces.items() if interface.are_words),
        video_marks=discovery.extras.video_marks,
    )


def _grid_positions(discovery: Discovery) -> GridPositions | None:
    """Compute position ids of written media; None: the foundation has no positions by row and column for images."""
    interface, function = discovery.interfaces.get("image"), discovery.positions
    if interface is None or function.config is None or not function.axes or _GRID not in interface.arguments:
        return None
    values = json.loads(function.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    special = special_ids(config)
    plain = [token for token in range(len(special) + 4) if token not in special]
    around = marks(config, "image") or (plain[1], plain[2])
    merge = vision_sizes(config, "image").merge
    return GridPositions(function, discovery.extras, (plain[0], around[0]), interface.token_id, around[1], merge)


@dataclass(frozen=True)
class GridPositions:
    """Computes the positions of written media as if the foundation read them as images; can be pickled."""

    function: PositionFunction
    extras: TokenExtras
    before: tuple[int, ...]  # ids before an image
    token_id: int  # of the placeholder
    after: int
    merge: int  # patches of a grid along a side that are one token

    def __call__(self, grid: Grid) -> np.ndarray | None:
        """See :attr:`~omnitrain.data.render.native.NativeInputs.grid_positions`."""
        count, first = math.prod(grid[1:]), len(self.before)
        ids = np.array([*self.before, *[self.token_id] * count, self.after])
        sizes = np.array([[grid.frames, grid.rows * self.merge, grid.columns * self.merge]])
        positions = self.function(ids, {_GRID: sizes}, self.extras(ids))
        return positions[:, first:] - positions[:, first - 1 : first] - 1


@dataclass(frozen=True)
class SamplePositions:
    """Computes the position ids of a sample from the features of its items."""

    function: PositionFunction  # the model's position function

    def __call__(
        self,
        input_ids: np.ndarray,
        token_inputs: Mapping[str, np.ndarray],
        features: Mapping[str, Sequence[Features]],
        *,
        audio_in_video: bool,
    ) -> np.ndarray:
        """See :attr:`~omnitrain.data.render.native.NativeInputs.positions`."""
        joined: dict[str, Any] = {}
        for items in features.values():
            for name in dict.fromkeys(name for item in items for name in item):
                arrays = [item[name] for item in items if name in item]
                # Positions depend on grids, lengths, times and masks, not on pixels and spectrograms.
                if not (arrays[0].ndim > 1 and np.issubdtype(arrays[0].dtype, np.floating)):
                    joined[name] = _concatenated(arrays)
        if audio_in_video:
            joined["use_audio_in_video"] = True
        return self.function(input_ids, joined, token_inputs)


def _concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate along axis 0; masks of different lengths are padded with zeros at the end."""
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    longest = max(array.shape[1] for array in arrays)
    rest = [(0, 0)] * (arrays[0].ndim - 2)
    return np.concatenate([np.pad(array, [(0, 0), (0, longest - array.shape[1]), *rest]) for array in arrays])
