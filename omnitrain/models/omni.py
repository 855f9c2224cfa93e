"""``OmniModel``: encoders, a foundation model and decoders behind one forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from omnitrain.data.native import NativeInputs
from omnitrain.data.pack import Pack
from omnitrain.data.sample import NATIVE_PREFIX
from omnitrain.errors import UserError
from omnitrain.models.components import ComponentAdapter
from omnitrain.models.contract.check import contract_of
from omnitrain.models.decoders.tokens import TokenDecoder, TokenDecoderConfig
from omnitrain.models.encoders.audio import AudioEncoder, AudioEncoderConfig
from omnitrain.models.encoders.vision import VisionEncoder, VisionEncoderConfig
from omnitrain.models.foundation import EncodedMedia, FoundationRunner, InsertedRows
from omnitrain.models.hf import as_config, foundation_class, load_strictly, model_class
from omnitrain.models.idle import idle_loss, idle_rows, num_calls, tied
from omnitrain.models.native import NativeRows, config_nodes, native_inputs
from omnitrain.models.outputs import OmniOutput
from omnitrain.ops.attention import use_omnitrain_attention


class OmniConfig(PreTrainedConfig):
    """Config of :class:`OmniModel`: the config of every component, as plain dicts with ``model_type``.

    Attributes:
        foundation: a HF causal language model's.
        encoders: component name -> config of a model with :class:`EncoderMixin`.
        decoders: component name -> config of a model with :class:`DecoderMixin`.
    """

    model_type = "omnitrain"

    foundation: dict | None = None
    encoders: dict | None = None
    decoders: dict | None = None


class OmniModel(PreTrainedModel):
    """One model over packed rows of text and media.

    Components are attributes by their names: ``foundation``, ``image_encoder``, ``audio_decoder``, ...
    """

    config_class = OmniConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _keep_in_fp32_modules_strict: ClassVar = ["tokenizer"]  # of a decoder: rounded weights would make other codes

    def __init__(self, config: OmniConfig, components: dict[str, PreTrainedModel] | None = None) -> None:
        """Build from ``config`` with random weights, or around ready ``components`` (name -> model)."""
        super().__init__(config)
        ready = components or {}
        self.encoder_names = sorted(config.encoders or {})
        self.decoder_names = sorted(config.decoders or {})
        self.foundation = ready.get("foundation") or _fresh(config.foundation or {}, foundation_class)
        # Sorted, as a saved config is: a loaded model must have its parameters in the order of the built one.
        for name, values in sorted({**(config.encoders or {}), **(config.decoders or {})}.items()):
            self.add_module(name, ready.get(name) or _fresh(values, model_class))
        self.post_init()
        for name in (*self.encoder_names, *self.decoder_names):
            use_omnitrain_attention(self.get_submodule(name))

    @cached_property
    def runner(self) -> FoundationRunner:
        """Runs the foundation by the contract that the check found for it.

        Raises:
            UserError: the check refused the foundation; names what was measured.
        """
        return FoundationRunner(self.foundation, contract_of(self.foundation))

    @classmethod
    def from_pretrained(cls, path: str, *args: Any, **kwargs: Any) -> OmniModel:
        """Load a saved omni model; a tensor missing, left over or misshapen is an error.

        Raises:
            UserError: no model there.
            WeightsError: names every tensor that does not fit.
        """
        if kwargs.get("output_loading_info"):
            return super().from_pretrained(path, *args, **kwargs)
        return load_strictly(cls, str(path), kwargs.pop("dtype", None), **kwargs)

    @property
    def encoders(self) -> dict[str, Any]:
        """Component name -> encoder."""
        return {name: self.get_submodule(name) for name in self.encoder_names}

    @property
    def decoders(self) -> dict[str, Any]:
        """Component name -> decoder."""
        return {name: self.get_submodule(name) for name in self.decoder_names}

    @property
    def components(self) -> dict[str, dict[str, torch.nn.Parameter]]:
        """Component name -> its parameters by their names in this model, the foundation first.

        The modalities that the foundation reads by itself are components of their own (``image_encoder``, ...), and
        ``foundation`` is the rest of it.
        """
        own = dict(self.foundation.named_parameters(prefix="foundation"))
        found = {
            name: {path: own[path] for path in (f"foundation.{p}" for p in paths)}
            for name, paths in self.runner.native.components.items()
        }
        attached = {name: self.get_submodule(name) for name in (*self.encoder_names, *self.decoder_names)}
        if taken := sorted(found.keys() & attached.keys()):
            raise UserError(
                f"model: {taken[0]!r} is the name of a component that the foundation has; choose another name"
            )
        return found | {name: dict(module.named_parameters(prefix=name)) for name, module in attached.items()}

    @property
    def native_inputs(self) -> NativeInputs:
        """What the data side must know of the modalities that the foundation reads by itself; often none."""
        return native_inputs(self.runner.native)

    def media_adapters(self) -> tuple[dict[str, ComponentAdapter], dict[str, ComponentAdapter]]:
        """``(readers, writers)``: the weightless side of encoders and decoders, for :class:`OmniProcessor`."""
        readers = {name: encoder.adapter() for name, encoder in self.encoders.items()}
        return readers, {name: decoder.adapter() for name, decoder in self.decoders.items()}

    def forward(self, pack: Pack, calls: Mapping[str, int] | None = None) -> OmniOutput:
        """Losses of one packed micro-batch.

        Args:
            pack: samples end to end; see :class:`Pack` for shapes.
            calls: component -> how often every rank of its mesh calls it in this micro-batch; what the pack does not
                need is done on the smallest input, and adds zero. None: what the pack needs.

        Returns:
            One :class:`LossTerm` per head with a target in the pack (``text`` always).
        """
        media, labels, idle = self.encode(pack, calls)
        text, hidden = self.runner.text_loss(pack, media)
        losses = {}
        called = {name for name, number in (calls or {}).items() if number and name in self.decoder_names}
        for name in sorted({*labels, *called}):  # in one order on all ranks, with targets or without
            if hidden is None:
                hidden_by = type(self.foundation).__name__
                raise UserError(f"{hidden_by} hides its last hidden states; no decoder can read them")
            if name in labels:
                rows = hidden[0, pack.targets[name].positions - 1]
                losses[name] = self.decoders[name].lm_head(rows, labels[name])
            else:
                idle.append(idle_loss(self, name, hidden))
        return OmniOutput(
            {"text": replace(text, sum=tied(text.sum, idle)), **losses}, None if hidden is None else hidden.detach()
        )

    def encode(
        self, pack: Pack, calls: Mapping[str, int] | None = None
    ) -> tuple[EncodedMedia, dict[str, torch.Tensor], list[torch.Tensor]]:
        """All media of a pack as rows of the foundation's input.

        Args:
            pack: the micro-batch.
            calls: see :meth:`forward`.

        Returns:
            The rows, decoder name -> labels ``[n]``, and what calls without data made.
        """
        inserted: list[InsertedRows] = []
        native: dict[str, NativeRows] = {}
        labels: dict[str, torch.Tensor] = {}
        idle: list[torch.Tensor] = []
        made = num_calls(self, pack)
        for name in sorted({*made, *(calls or {})}):  # in one order on all ranks, with data or without
            if name in pack.targets:
                batch = pack.targets[name]
                encoded = [self.decoders[name].lm_encode(group.features, group.num_tokens) for group in batch.groups]
                rows, labels[name] = (torch.cat(part) for part in zip(*encoded, strict=True))
                inserted.append(InsertedRows(batch.positions, rows))
            elif name in pack.inputs and name.startswith(NATIVE_PREFIX):
                native[name] = self.runner.encode_one(pack, name)
            elif name in pack.inputs:
                batch = pack.inputs[name]
                encoder = self.encoders[name]
                rows = torch.cat([encoder.lm_encode(group.features, group.num_tokens) for group in batch.groups])
                inserted.append(InsertedRows(batch.positions, rows))
            for _ in range((calls or {}).get(name, 0) - made.get(name, 0)):
                idle += idle_rows(self, name)
        return EncodedMedia(self.runner.joined(pack, native), inserted), labels, idle


def _fresh(values: dict[str, Any], class_of: Callable[[PreTrainedConfig], type[PreTrainedModel]]) -> PreTrainedModel:
    config = as_config(values)
    for _, node in config_nodes(config):
        node.dtype = None  # the one that is asked for holds for all parts, not what each was saved in
    return class_of(config)(config)


AutoConfig.register("omnitrain", OmniConfig)
AutoModel.register(OmniConfig, OmniModel)
for _config, _model in (
    (VisionEncoderConfig, VisionEncoder),
    (AudioEncoderConfig, AudioEncoder),
    (TokenDecoderConfig, TokenDecoder),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
