"""The base class of a model with named components, which adapters, files and layouts use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.errors import UserError


class ComponentModel(PreTrainedModel):
    """A foundation with encoders and decoders, which are submodules with the component's name.

    Attributes:
        foundation: an HF causal language model.
        encoder_names: names of encoders, sorted.
        decoder_names: names of decoders, sorted.
        renamed: parameter -> its name after adapters were added, then the names of its adapters. Parameters without
            adapters keep their names and are not in it.
    """

    foundation: PreTrainedModel

    def __init__(self, config: PreTrainedConfig, encoders: Iterable[str], decoders: Iterable[str]) -> None:
        """Set the names; the subclass adds the submodules."""
        super().__init__(config)
        self.encoder_names, self.decoder_names = sorted(encoders), sorted(decoders)
        self.renamed: dict[str, tuple[str, ...]] = {}

    @property
    def foundation_components(self) -> Mapping[str, Sequence[str]]:
        """Component of the foundation (``foundation`` itself, ``image_encoder``, ...) -> names of its parameters."""
        raise NotImplementedError

    @property
    def runner(self) -> Any:
        """What runs the foundation, and knows how it was tested: a ``FoundationRunner``."""
        raise NotImplementedError

    @property
    def encoders(self) -> dict[str, Any]:
        """Component name -> encoder."""
        return {name: self.get_submodule(name) for name in self.encoder_names}

    @property
    def decoders(self) -> dict[str, Any]:
        """Component name -> decoder."""
        return {name: self.get_submodule(name) for name in self.decoder_names}

    @property
    def components(self) -> dict[str, dict[str, nn.Parameter]]:
        """Component name -> its parameters by their names in this model, the foundation first.

        Towers inside the foundation are separate components (``image_encoder``, ...); ``foundation`` has its other
        parameters.

        Raises:
            UserError: an encoder or decoder has the name of a component inside the foundation.
        """
        parameters = dict(self.foundation.named_parameters(prefix="foundation"))
        native = {
            name: {
                path: parameters[path]
                for p in paths
                for path in self.renamed.get(f"foundation.{p}", (f"foundation.{p}",))
            }
            for name, paths in self.foundation_components.items()
        }
        attached = {name: self.get_submodule(name) for name in (*self.encoder_names, *self.decoder_names)}
        if taken := sorted(native.keys() & attached.keys()):
            raise UserError(
                f"model: the foundation already has a component named {taken[0]!r}; choose another name for yours"
            )
        return native | {name: dict(module.named_parameters(prefix=name)) for name, module in attached.items()}

    @property
    def adapter_names(self) -> frozenset[str]:
        """Names of the LoRA adapters among the parameters."""
        return frozenset(name for names in self.renamed.values() for name in names[1:])
