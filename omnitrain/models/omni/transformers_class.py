"""An omni model of one vision tower, its projector and a language model, as a class of transformers.

LLaVA's classes take any tower and any language model that ``AutoModel`` builds from a config.
``LlavaForConditionalGeneration`` fits ``projector.kind: linear``. ``VipLlavaForConditionalGeneration``, whose projector
has a norm, fits ``mlp``. No such class joins neighbours as ``pixel_shuffle`` does.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.encoders.towers import JoinedTowers, ProjectorSettings
from omnitrain.models.encoders.vision import VisionEncoder
from omnitrain.models.hf.load import as_dict, foundation_class
from omnitrain.models.omni.model import OmniModel

_PLACEHOLDER = 0  # any token; the caller sets the token of its tokenizer
_TOLERANCE = {torch.float32: 1e-6}  # of logits, relative to the largest; other dtypes: 1e-2


@torch.no_grad()
def as_transformers_class(model: OmniModel) -> PreTrainedModel:
    """Return ``model``, in eval mode, as a class of transformers, with the same weights and (checked) logits.

    The caller must set ``image_token_id``; each image has ``image_seq_length`` of these tokens. ``model``: on the CPU,
    without LoRA adapters. Raises UserError: transformers has no such class; names the part that does not fit.
    """
    encoder = _only_vision_encoder(model)
    foundation = model.foundation
    features, num_tokens = encoder.minimal_input()
    zeros = features["pixel_values"]
    noise = torch.randn(zeros.shape, generator=torch.Generator().manual_seed(0)).to(zeros.dtype)
    features = features | {"pixel_values": noise}
    settings = ProjectorSettings(**(encoder.config.projector or {}))
    height, width = (side // encoder.tower.config.patch_size for side in noise.shape[-2:])
    num_before = encoder.tower(pixel_values=noise.to(encoder.tower.dtype)).last_hidden_state.size(1) - height * width
    config = AutoConfig.for_model(
        vision_config=as_dict(encoder.tower.config),
        text_config=as_dict(foundation.config),
        vision_feature_layer=-1,
        image_seq_length=num_tokens[0],
        tie_word_embeddings=foundation.config.tie_word_embeddings,
        **_of_kind(settings.kind, num_before),
    )
    with torch.device("meta"):
        whole = cast(Any, foundation_class(config)(config))
    parts = {"language model": (whole.model.language_model, foundation.base_model)}
    parts["vision tower"] = (whole.model.vision_tower, encoder.tower)
    for what, (theirs, ours) in parts.items():
        if type(theirs) is not type(ours):
            raise UserError(f"its {what} would be a {type(theirs).__name__}, not a {type(ours).__name__}")
    head = foundation.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UserError(f"{type(whole).__name__} has no bias of the language-model head")
    whole.model.language_model, whole.model.vision_tower, whole.lm_head = foundation.base_model, encoder.tower, head
    _set_projector(whole.model.multi_modal_projector, encoder.projector.layers)
    whole.eval()
    _require_same_logits(model, encoder, whole, features, num_tokens[0])
    return whole


def _only_vision_encoder(model: OmniModel) -> VisionEncoder:
    encoders = list(model.encoders.values())
    if len(encoders) != 1 or model.decoders or not isinstance(encoders[0], VisionEncoder):
        names = ", ".join(sorted([*model.encoders, *model.decoders]))
        raise UserError(f"no class of transformers has these components: {names}")
    if encoders[0].takes_grid or isinstance(encoders[0].tower, JoinedTowers):
        raise UserError(f"no class of transformers joins a {type(encoders[0].tower).__name__} to any language model")
    return encoders[0]


def _of_kind(kind: str, first: int) -> dict[str, Any]:
    """Return the keys of the config for a kind of projector and a tower with ``first`` tokens before the patches."""
    if kind == "linear" and first <= 1:
        strategy = ("full", "default")[first]
        return {"model_type": "llava", "projector_hidden_act": "linear", "vision_feature_select_strategy": strategy}
    if kind == "mlp" and first == 1:
        return {"model_type": "vipllava"}
    raise UserError(
        f"no class of transformers has projector.kind: {kind} after a tower with {first} tokens before its patches"
    )


def _set_projector(projector: Any, layers: nn.Sequential) -> None:
    if len(layers) > 1:
        projector.projector_layernorm, projector.linear_1, projector.linear_2 = layers[0], layers[1], layers[3]
        return
    weight = cast(torch.Tensor, layers[0].weight)
    projector.linear_1 = layers[0]
    projector.linear_2 = nn.Linear(weight.size(0), weight.size(0), dtype=weight.dtype)  # the identity
    nn.init.eye_(projector.linear_2.weight)
    nn.init.zeros_(projector.linear_2.bias)


def _require_same_logits(
    model: OmniModel, encoder: VisionEncoder, whole: Any, features: dict[str, torch.Tensor], num_tokens: int
) -> None:
    """Refuse a class that gives other logits for text, an image and text: it does something around its parts."""
    model.eval()
    embedding = model.foundation.get_input_embeddings()
    text = torch.arange(1, min(9, embedding.weight.size(0)))
    ids = torch.cat([text, torch.full((num_tokens,), _PLACEHOLDER), text])[None]
    embeds = embedding(ids)
    embeds[ids == _PLACEHOLDER] = encoder.lm_encode(features, (num_tokens,)).to(embeds.dtype)
    expected = model.foundation(inputs_embeds=embeds).logits
    whole.config.image_token_id = _PLACEHOLDER
    name = type(whole).__name__
    try:
        found = whole(input_ids=ids, pixel_values=features["pixel_values"]).logits
    except Exception as error:  # each class fails differently
        raise UserError(f"{name} does not run with these parts: {' '.join(str(error).split())}") from error
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    if not difference <= _TOLERANCE.get(expected.dtype, 1e-2):
        raise UserError(f"the logits of {name} with these weights differ by {difference:.1e} of the largest")
