"""``OmniModel``: encoders, a foundation model and decoders behind one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from omnitrain.data.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.components import ComponentAdapter
from omnitrain.models.decoders.tokens import TokenDecoder, TokenDecoderConfig
from omnitrain.models.encoders.audio import AudioEncoder, AudioEncoderConfig
from omnitrain.models.encoders.vision import VisionEncoder, VisionEncoderConfig
from omnitrain.models.hf import as_config, load_strictly, model_class
from omnitrain.models.outputs import OmniOutput
from omnitrain.ops.attention import use_omnitrain_attention
from omnitrain.ops.cross_entropy import LossTerm, linear_cross_entropy

Head = Callable[[torch.Tensor, Any], torch.Tensor]


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
    loss_backend = "auto"  # of linear_cross_entropy

    def __init__(self, config: OmniConfig, components: dict[str, PreTrainedModel] | None = None) -> None:
        """Build from ``config`` with random weights, or around ready ``components`` (name -> model)."""
        super().__init__(config)
        ready = components or {}
        self.encoder_names = sorted(config.encoders or {})
        self.decoder_names = sorted(config.decoders or {})
        self.foundation = ready.get("foundation") or _fresh(config.foundation or {}, AutoModelForCausalLM)
        # Sorted, as a saved config is: a loaded model must have its parameters in the order of the built one.
        for name, values in sorted({**(config.encoders or {}), **(config.decoders or {})}.items()):
            self.add_module(name, ready.get(name) or _fresh(values, AutoModel))
        self.post_init()
        use_omnitrain_attention(self)

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
    def components(self) -> dict[str, PreTrainedModel]:
        """Component name -> module, the foundation first."""
        return {"foundation": self.foundation, **self.encoders, **self.decoders}

    def media_adapters(self) -> tuple[dict[str, ComponentAdapter], dict[str, ComponentAdapter]]:
        """``(readers, writers)``: the weightless side of encoders and decoders, for :class:`OmniProcessor`."""
        readers = {name: encoder.adapter() for name, encoder in self.encoders.items()}
        return readers, {name: decoder.adapter() for name, decoder in self.decoders.items()}

    def forward(self, pack: Pack) -> OmniOutput:
        """Losses of one packed micro-batch.

        Args:
            pack: samples end to end; see :class:`Pack` for shapes.

        Returns:
            One :class:`LossTerm` per head with a target in the pack (``text`` always).
        """
        embeds, labels = self.embed(pack)
        losses: dict[str, LossTerm] = {}

        def text_loss(hidden: torch.Tensor, head: Any) -> torch.Tensor:
            rows, labels = hidden[0, pack.text_rows], pack.text_labels
            bias = getattr(head, "bias", None)
            losses["text"] = linear_cross_entropy(
                rows, head.weight, labels, bias, count=labels.numel(), backend=self.loss_backend
            )
            return hidden

        hidden = self.run_foundation(
            embeds,
            head=text_loss,
            position_ids=pack.position_ids,
            cu_seq_lens_q=pack.cu_seqlens,
            cu_seq_lens_k=pack.cu_seqlens,
            max_length_q=pack.max_seqlen,
            max_length_k=pack.max_seqlen,
            use_cache=False,
        )
        for name, decoder in self.decoders.items():
            if name in labels:
                before = pack.targets[name].positions - 1
                losses[name] = decoder.lm_head(hidden[0, before], labels[name])
        return OmniOutput(losses, hidden)

    def embed(self, pack: Pack) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Input embeddings ``[1, T, hidden]`` with all media in place, and decoder name -> labels ``[n]``."""
        embeds = self.foundation.get_input_embeddings()(pack.input_ids)
        labels: dict[str, torch.Tensor] = {}
        for name, batch in pack.inputs.items():
            rows = self.get_submodule(name).lm_encode(batch.features, batch.num_tokens)
            embeds = embeds.index_copy(1, batch.positions, rows[None].to(embeds.dtype))
        for name, batch in pack.targets.items():
            rows, labels[name] = self.get_submodule(name).lm_encode(batch.features, batch.num_tokens)
            embeds = embeds.index_copy(1, batch.positions, rows[None].to(embeds.dtype))
        return embeds, labels

    def run_foundation(self, embeds: torch.Tensor, *, head: Head, **kwargs: Any) -> torch.Tensor:
        """Run the foundation on embeddings, with ``head(hidden, lm_head)`` in place of its language-model head.

        The replacement runs inside the foundation's forward, so that no logits of all rows are ever made and the
        head's weight is where a sharding of the foundation puts it.

        Returns:
            What ``head`` returned (a tensor).

        Raises:
            UserError: the foundation changes its logits after the head (soft cap, scale), so a loss in the head would
                be another loss.
        """
        with _replaced_forward(self.foundation.get_output_embeddings(), head) as result:
            output = self.foundation(inputs_embeds=embeds, **kwargs)
        if output.logits is not result[0]:
            raise UserError(
                f"{type(self.foundation).__name__} transforms its logits after the head (soft cap, scale or cut); "
                "omnitrain computes the loss inside the head and would train another loss"
            )
        return result[0]


@contextmanager
def _replaced_forward(module: nn.Module, head: Head) -> Iterator[list[torch.Tensor]]:
    result: list[torch.Tensor] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        result.append(head(hidden, module))
        return result[0]

    module.forward = forward
    try:
        yield result
    finally:
        del module.forward


def _fresh(values: dict[str, Any], auto_class: Any) -> PreTrainedModel:
    config = as_config(values)
    return model_class(config, auto_class)(config)


AutoConfig.register("omnitrain", OmniConfig)
AutoModel.register(OmniConfig, OmniModel)
for _config, _model in (
    (VisionEncoderConfig, VisionEncoder),
    (AudioEncoderConfig, AudioEncoder),
    (TokenDecoderConfig, TokenDecoder),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
