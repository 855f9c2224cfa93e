"""A model of named components, as adapters, files and layouts know it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.errors import UserError


class ComponentModel(PreTrainedModel):
    """A foundation with encoders and decoders, each a submodule by its name.

    Attributes:
        foundation: a HF causal language model.
        encoder_names: sorted.
        decoder_names: sorted.
        renamed: parameter -> its name since adapters lie next to it, then the adapters' names. Parameters without
            adapters are not in it and keep their names.
    """

    foundation: PreTrainedModel

    def __init__(self, config: PreTrainedConfig, encoders: Iterable[str], decoders: Iterable[str]) -> None:
        """Submodules are added by the subclass."""
        super().__init__(config)
        self.encoder_names, self.decoder_names = sorted(encoders), sorted(decoders)
        self.renamed: dict[str, tuple[str, ...]] = {}

    @property
    def foundation_components(self) -> Mapping[str, Sequence[str]]:
        """Component of the foundation (``foundation`` itself, ``image_encoder``, ...) -> names of its parameters."""
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

        The modalities that the foundation reads by itself are components of their own (``image_encoder``, ...), and
        ``foundation`` is the rest of it.

        Raises:
            UserError: an encoder or decoder has the name of such a modality.
        """
        own = dict(self.foundation.named_parameters(prefix="foundation"))
        found = {
            name: {path: own[path] for p in paths for path in self.renamed.get(f"foundation.{p}", (f"foundation.{p}",))}
            for name, paths in self.foundation_components.items()
        }
        attached = {name: self.get_submodule(name) for name in (*self.encoder_names, *self.decoder_names)}
        if taken := sorted(found.keys() & attached.keys()):
            raise UserError(
                f"model: {taken[0]!r} is the name of a component that the foundation has; choose another name"
            )
        return found | {name: dict(module.named_parameters(prefix=name)) for name, module in attached.items()}

    @property
    def adapter_names(self) -> frozenset[str]:
        """Names of the LoRA adapters among the parameters."""
        return frozenset(name for names in self.renamed.values() for name in names[1:])
