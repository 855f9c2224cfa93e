"""A modality of a HuggingFace model: rows out of its own feature method, and into its own forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.discovery.features import MediaFeatures, RowLayout, flatten
from omnitrain.models.discovery.probe_inputs import ProbeInput
from omnitrain.ops.device import to_device


@dataclass(frozen=True)
class ModalityInterface:
    """How rows of one modality leave a model's towers and enter its forward. Plain facts: holds no module, pickles.

    Attributes:
        modality: ``image``, ``video`` or ``audio``.
        component: name of the component that makes the rows; modalities with shared parameters share it.
        token_id: the placeholder; every row takes the place of one.
        host: name of the module whose feature method makes the rows (empty: the model itself).
        overridden: names of all modules with that method.
        arguments: of the model's forward that hold the media.
        bindings: parameter of the feature method -> argument it is, and whether the forward inverts it first.
        constants: parameters of the feature method that the forward sets by itself.
        trigger: arguments that make the forward ask for rows.
        layout: of the feature method's output.
        probe: makes tiny inputs.
        parameters: names of all that the feature method reads, in the model.
        items_are_independent: rows of an item are the same whether encoded alone or beside others (of its size, unless
            ``probe.variable``).
        items_stack: the features of two items of one size, joined along dim 0 as packs join them, are those of both in
            one call.
        minimal_rows: that the tower makes of :meth:`minimal_input`; 0: it refuses that, alone.
        called_by_number: names of the modules that one call of the feature method calls the more often the more items
            it is given, such as a projector in a loop over images.
    """

    modality: str
    component: str
    token_id: int
    host: str
    overridden: tuple[str, ...]
    arguments: tuple[str, ...]
    bindings: dict[str, tuple[str, bool]]
    constants: dict[str, Any]
    trigger: dict[str, Tensor]
    layout: RowLayout
    probe: ProbeInput
    parameters: tuple[str, ...]
    items_are_independent: bool
    items_stack: bool
    minimal_rows: int
    called_by_number: tuple[str, ...]

    @property
    def method(self) -> str:
        """Name of the feature method."""
        return method_name(self.modality)

    @property
    def side(self) -> tuple[str, ...]:
        """Names of the tensors beside the main one that have a row per placeholder, such as deepstack levels."""
        return self.layout.names[1:]

    def encode(self, model: PreTrainedModel, features: Mapping[str, Any]) -> MediaFeatures:
        """Rows of some items, by the model's own method; those of each as its output is cut, else all as one item.

        Args:
            model: the HF model.
            features: values of the forward's media arguments (what the HF processor returns).

        Raises:
            UserError: an argument is missing.
        """
        arguments = dict(self.constants)
        for parameter, (name, inverted) in self.bindings.items():
            if features.get(name) is not None:
                arguments[parameter] = ~features[name] if inverted else features[name]
        missing = [name for name in self.probe.names[:1] if features.get(name) is None]
        if missing:
            raise UserError(f"{self.modality} features of {type(model).__name__} need {missing[0]!r}")
        output = getattr(model.get_submodule(self.host), self.method)(**arguments, return_dict=True)
        return flatten(output, self.layout)

    def minimal_input(self) -> dict[str, Tensor]:
        """The smallest input of one item that the tower takes, for a rank that must take part without data."""
        return self.probe.make([0])

    def probe_items(self, number: int) -> list[dict[str, Tensor]]:
        """Tiny inputs of single items, different in content and, where the model allows, in size."""
        return [self.probe.make([item]) for item in range(number)]

    def probe_batch(self, number: int) -> dict[str, Tensor]:
        """The same items as one input."""
        return self.probe.make(list(range(number)))


@contextmanager
def override(
    model: PreTrainedModel, ports: Mapping[str, ModalityInterface], rows: Mapping[str, MediaFeatures]
) -> Iterator[dict[str, Any]]:
    """While open, the model's feature methods return these rows instead of running its towers.

    Yields what to pass to the model's forward beside ids and positions::

        with override(model, ports, {"image": rows}) as arguments:
            model(input_ids=ids, position_ids=positions, **arguments)

    Args:
        model: the HF model.
        ports: modality -> port of the model.
        rows: modality -> its rows, in the order of their placeholders; checked against these before.

    Raises:
        UserError: the model lacks a modality.
    """
    lacking = [modality for modality in rows if modality not in ports]
    if lacking:
        raise UserError(f"{type(model).__name__} has no {lacking[0]} input; it reads {sorted(ports) or 'only text'}")
    patched: list[tuple[torch.nn.Module, str]] = []
    arguments: dict[str, Any] = {}
    try:
        for modality, value in rows.items():
            port = ports[modality]
            output = value.as_output()
            for name in port.overridden:
                module = model.get_submodule(name)
                object.__setattr__(module, port.method, _returning(output))
                patched.append((module, port.method))
            device = value.main.device
            arguments |= {name: to_device(tensor, device) for name, tensor in port.trigger.items()}
        yield arguments
    finally:
        for module, name in patched:
            object.__delattr__(module, name)


def _returning(output: Any) -> Any:
    return lambda *args, **kwargs: output


def method_name(modality: str) -> str:
    """Name of the method of HF models that encodes a modality."""
    return f"get_{modality}_features"
