"""The interface of a modality of an HF model: compute features by its own method, and pass them to its own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.discovery.features import MediaFeatures, RowLayout, flatten
from omnitrain.models.discovery.probe_inputs import ProbeInput
from omnitrain.ops.host_values import to_device
from omnitrain.ops.patch_forward import wrapped_forward

WORDS = "words"  # name of the ids among the side tensors of features


@dataclass(frozen=True)
class ModalityInterface:
    """How features of one modality are computed and enter the model's forward. Holds no module and can be pickled."""

    modality: str  # ``image``, ``video`` or ``audio``
    component: str  # name of the component that computes the features; modalities with shared parameters share it
    token_id: int  # id of the placeholder token; each feature replaces one placeholder
    host: str  # name of the module whose feature method is called (empty: the model itself)
    overridden: tuple[str, ...]  # names of all modules with that method
    arguments: tuple[str, ...]  # names of the arguments of the model's forward that hold the media
    bindings: dict[str, tuple[str, bool]]  # the method's parameter -> argument of the forward, and if it is inverted
    constants: dict[str, Any]  # parameters of the feature method that the forward sets by itself
    trigger: dict[str, Tensor]  # arguments that make the forward call the feature method
    layout: RowLayout  # layout of the feature method's output
    probe: ProbeInput  # makes tiny inputs
    parameters: tuple[str, ...]  # names of the model's parameters that the feature method reads
    items_are_independent: bool  # of other items in the call (of the same size, unless ``probe.variable``)
    items_stack: bool  # the input of two items of one size is the concatenation of both along dim 0, as packs join them
    minimal_rows: int  # number of features of :meth:`minimal_input`; 0: the tower refuses this input alone
    called_by_number: tuple[str, ...]  # modules that a call runs more often for more items, as in a loop over images
    # the features are looked up in the model's own token embeddings: its codes are words of the vocabulary
    are_words: bool = False

    @property
    def method(self) -> str:
        """The name of the feature method."""
        return method_name(self.modality)

    @property
    def side(self) -> tuple[str, ...]:
        """The names of further tensors with one row per placeholder, such as deepstack levels."""
        return self.layout.names[1:]

    def encode(self, model: PreTrainedModel, features: Mapping[str, Any]) -> MediaFeatures:
        """Compute features of items by the model's method on the forward's arguments; UserError: one is missing."""
        arguments = dict(self.constants)
        for parameter, (name, inverted) in self.bindings.items():
            if features.get(name) is not None:
                arguments[parameter] = ~features[name] if inverted else features[name]
        missing = [name for name in self.probe.names[:1] if features.get(name) is None]
        if missing:
            raise UserError(f"{self.modality} features of {type(model).__name__} need {missing[0]!r}")
        output = getattr(model.get_submodule(self.host), self.method)(**arguments, return_dict=True)
        return flatten(output, self.layout)

    def words(self, model: PreTrainedModel, encode: Callable[[], MediaFeatures]) -> MediaFeatures:
        """Return features ``[rows, 1]`` of zeros, and beside them the token ids ``[rows]`` int64 of the codes.

        ``encode`` does not look the ids up; the foundation does, as for a text.
        """
        found: list[Tensor] = []

        def note(ids: Tensor) -> Tensor:
            found.append(ids.flatten())
            return ids.new_zeros(*ids.shape, 1, dtype=torch.float32)

        with wrapped_forward(model.get_input_embeddings(), note):
            features = encode()
        return replace(features, side={**features.side, WORDS: torch.cat(found).long()})

    def minimal_input(self) -> dict[str, Tensor]:
        """Return the smallest input of one item, for a rank that must run the tower without data."""
        return self.probe.make([0])

    def probe_items(self, number: int) -> list[dict[str, Tensor]]:
        """Return ``number`` tiny inputs of one item each; content and, if the model allows it, sizes differ."""
        return [self.probe.make([item]) for item in range(number)]

    def probe_batch(self, number: int) -> dict[str, Tensor]:
        """Return the items of :meth:`probe_items` as one input."""
        return self.probe.make(list(range(number)))


@contextmanager
def override(
    model: PreTrainedModel, interfaces: Mapping[str, ModalityInterface], rows: Mapping[str, MediaFeatures]
) -> Iterator[dict[str, Any]]:
    """Let the model's feature methods return ``rows`` (modality -> features); yields arguments of the forward."""
    unknown = [modality for modality in rows if modality not in interfaces]
    if unknown:
        raise UserError(
            f"{type(model).__name__} has no {unknown[0]} input; it reads {sorted(interfaces) or 'only text'}"
        )
    arguments: dict[str, Any] = {}
    with ExitStack() as stack:
        for modality, value in rows.items():
            interface = interfaces[modality]
            give = partial(_given, value.as_output())
            stack.enter_context(methods_replaced(model, interface.overridden, interface.method, give))
            device = value.main.device
            arguments |= {name: to_device(tensor, device) for name, tensor in interface.trigger.items()}
        yield arguments


def _given(output: Any, *args: Any, **kwargs: Any) -> Any:
    return output


@contextmanager
def methods_replaced(
    model: nn.Module, names: Sequence[str], method: str, function: Callable[..., Any]
) -> Iterator[None]:
    """Replace a method of the named modules by ``function``."""
    modules = [model.get_submodule(name) for name in names]
    for module in modules:
        object.__setattr__(module, method, function)
    try:
        yield
    finally:
        for module in modules:
            object.__delattr__(module, method)


def method_name(modality: str) -> str:
    """Return the name of the method of HF models that encodes a modality."""
    return f"get_{modality}_features"
