"""The base class of a model with named components, which adapters, files and layouts use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.components.protocols import EncoderMixin
from omnitrain.transformers_private import ContainerModel


class ComponentModel(ContainerModel):
    """A foundation with encoders and decoders, which are submodules with the component's name."""

    foundation: PreTrainedModel  # a causal language model

    def __init__(self, config: PreTrainedConfig, encoders: Iterable[str], decoders: Iterable[str]) -> None:
        """Set the names; the subclass adds the submodules."""
        super().__init__(config)
        self.encoder_names, self.decoder_names = sorted(encoders), sorted(decoders)
        self.divided: tuple[str, ...] = ()  # encoders whose tower and projector are components by themselves
        # Parameter with adapters -> its name after they were added, then the names of its adapters.
        self.renamed: dict[str, tuple[str, ...]] = {}
        # Ids of tokens that the foundation's checkpoint lacks: their rows of its embeddings start with random values.
        self.added_tokens: tuple[int, ...] = ()

    @property
    def foundation_components(self) -> Mapping[str, Sequence[str]]:
        """Component of the foundation (``foundation`` itself, ``image_encoder``, ...) -> names of its parameters."""
        raise NotImplementedError

    @property
    def runner(self) -> Any:
        """The runner of the foundation, which knows how it was tested: a ``FoundationRunner``."""
        raise NotImplementedError

    def find_draws(self) -> None:
        """Look again whether the foundation draws random numbers in training, after modules were added to it."""
        raise NotImplementedError

    @property
    def encoders(self) -> dict[str, Any]:
        """Component name -> encoder."""
        return {name: self.get_submodule(name) for name in self.encoder_names}

    @property
    def teachers(self) -> dict[str, tuple[str, ...] | None]:
        """Encoder that is a frozen language model, whose features losses read -> the data sources of its samples.

        None: all sources.
        """
        found = {name: encoder.config for name, encoder in self.encoders.items() if encoder.is_teacher}
        return {name: None if config.sources is None else tuple(config.sources) for name, config in found.items()}

    @property
    def compared(self) -> tuple[str, ...]:
        """Names of the teachers from which the divergence of the foundation is a loss."""
        return tuple(name for name in self.teachers if self.get_submodule(name).head is not None)

    @property
    def language_models(self) -> dict[str, tuple[PreTrainedModel, str]]:
        """``foundation``, and each teacher -> the causal language model that it is, and its name in this model."""
        taught = {name: (self.get_submodule(name).model, f"{name}.model") for name in self.teachers}
        return {"foundation": (self.foundation, "foundation"), **taught}

    @property
    def decoders(self) -> dict[str, Any]:
        """Component name -> decoder."""
        return {name: self.get_submodule(name) for name in self.decoder_names}

    def divide(self, encoders: Iterable[str]) -> None:
        """Make ``NAME.tower`` and ``NAME.projector`` components; UserError: an encoder cannot run them apart."""
        names = tuple(sorted(encoders))
        for name in names:
            kind = type(self.get_submodule(name))
            if getattr(kind, "lm_tower", EncoderMixin.lm_tower) is EncoderMixin.lm_tower:
                raise UserError(
                    f"{name}: a {kind.__name__} has no lm_tower and lm_project that run its tower and its projector "
                    f"apart; name {name} as a whole"
                )
        self.divided = names

    @property
    def reads(self) -> dict[str, str]:
        """Component that reads the features of another one, in place of media -> that component."""
        return {f"{name}.projector": f"{name}.tower" for name in self.divided}

    def has_backward(self, component: str) -> bool:
        """Return whether parameters of a component train, or of the one whose features it reads."""
        read, components = [self.reads[component]] if component in self.reads else [], self.components
        return any(p.requires_grad for name in (component, *read) for p in components[name].values())

    @property
    def components(self) -> dict[str, dict[str, nn.Parameter]]:
        """Component name -> its parameters by their names in this model, the foundation first.

        Towers inside the foundation are separate components (``image_encoder``, ...). Raises UserError: an encoder or
        decoder has the name of a component inside the foundation.
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
        found = native | {name: dict(module.named_parameters(prefix=name)) for name, module in attached.items()}
        for name in self.compared:  # their output layers stand beside the foundation's
            heads = {path: found[name].pop(path) for path in [*found[name]] if path.startswith(f"{name}.head.")}
            found["foundation"] = found["foundation"] | heads
        for name in self.divided:
            whole = found.pop(name)
            found[f"{name}.tower"] = {path: p for path, p in whole.items() if path.startswith(f"{name}.tower.")}
            found[f"{name}.projector"] = {path: p for path, p in whole.items() if path not in found[f"{name}.tower"]}
        return found

    @property
    def adapter_names(self) -> frozenset[str]:
        """Names of the LoRA adapters among the parameters."""
        return frozenset(name for names in self.renamed.values() for name in names[1:])
