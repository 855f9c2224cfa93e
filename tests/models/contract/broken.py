"""Models that are fine for plain transformers, each with one trait that training has to notice."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration, Qwen3ForCausalLM, Qwen3VLForConditionalGeneration
from transformers.models.llava.modeling_llava import LlavaModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb, repeat_kv
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel


class Capped(Qwen3ForCausalLM):
    """Its logits are soft-capped."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 5 * torch.tanh(output.logits / 5)
        return output


class BlindAttention(Qwen3Attention):
    """Causal over all it is given; no mask, no interface."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = (repeat_kv(tensor, self.num_key_value_groups) for tensor in (key, value))
        rows = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scaling)
        return self.o_proj(rows.transpose(1, 2).flatten(2)), None


class MaskIgnored(Qwen3ForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.__class__ = BlindAttention


class Smear(nn.Module):
    """Each row gets half of the one before it."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows + 0.5 * F.pad(rows, (0, 0, 1, 0))[:, :-1]


class Leaking(Qwen3ForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].mlp = nn.Sequential(self.model.layers[1].mlp, Smear())


class MixingAtTheEnd(Qwen3ForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm = nn.Sequential(Smear(), self.model.norm)


class LeakingOutsideOfModules(Qwen3ForCausalLM):
    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        embeds = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embeds + embeds.cumsum(1) / 4, **kwargs)


class LookingAhead(Qwen3ForCausalLM):
    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        embeds = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embeds + embeds.flip(1).cumsum(1).flip(1) / 4, **kwargs)


class CountingPlaces(Qwen3ForCausalLM):
    """Scales rows by where they lie, whatever their position ids."""

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        embeds = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embeds * torch.arange(1, 1 + embeds.size(1))[:, None], **kwargs)


class Undefined(Qwen3ForCausalLM):
    """Gives numbers only for a row of many tokens."""

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        embeds = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embeds + torch.tensor(embeds.size(1) - 20.0).sqrt(), **kwargs)


class WithSpareParts(Qwen3ForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.spare = nn.Linear(2, 2)


class ReadByLongTexts(Qwen3ForCausalLM):
    """A layer compresses runs of four tokens; a text of fewer has none."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.compressor = nn.Linear(config.hidden_size, config.hidden_size)
        self.model.layers[0].mlp.register_forward_hook(partial(_add_compressed, self.compressor))


def _add_compressed(compressor: nn.Linear, module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor:
    if output.size(1) < 4:
        return output
    runs = compressor(arguments[0])[:, 3::4]
    return output + F.pad(runs.repeat_interleave(4, 1), (0, 0, 0, output.size(1) - 4 * runs.size(1)))


class ReadFromOutside(Qwen3ForCausalLM):
    """Layers take the weight of a module that they do not call."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.gate_proj.register_forward_hook(partial(_add_product, layer.mlp.up_proj))


def _add_product(other: nn.Linear, module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor:
    return output + F.linear(*arguments, other.weight)


class TrainingAlone(LlavaForConditionalGeneration):
    """Its tower fails in training, where features and their sizes must agree in number."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.vision_tower.register_forward_pre_hook(_require_two)


def _require_two(tower: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    if tower.training:
        raise RuntimeError("split_sizes must sum exactly to the number of features")


class Refusing(Qwen3ForCausalLM):
    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        raise ValueError("rows must be a multiple of 128")


class Asserting(Qwen3ForCausalLM):
    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        raise AssertionError("rows come in pairs")


class TiedWidths(Qwen3ForCausalLM):
    """Its MLP is four times as wide as a row."""

    def __init__(self, config: Any) -> None:
        if config.intermediate_size != 4 * config.hidden_size:
            raise ValueError("the MLP of this model has four times the hidden width")
        super().__init__(config)


class CrossAttending(Qwen3ForCausalLM):
    """Takes images by another way than rows in the place of tokens."""

    def forward(self, input_ids: Tensor | None = None, pixel_values: Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **kwargs)


class _Flat(Qwen3VLTextModel):
    def _deepstack_process(self, hidden_states: Tensor, *args: Any) -> Tensor:
        return hidden_states


class WithoutDeepstack(Qwen3VLForConditionalGeneration):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.language_model.__class__ = _Flat


class _Mixing(LlavaModel):
    @wraps(LlavaModel.get_image_features)
    def get_image_features(self, pixel_values: Tensor, **kwargs: Any) -> Any:
        output = super().get_image_features(pixel_values=pixel_values, **kwargs)
        mean = torch.stack(list(output.pooler_output)).mean(0)
        output.pooler_output = [rows + mean for rows in output.pooler_output]
        return output


class MixingImages(LlavaForConditionalGeneration):
    """An image's rows depend on the other images of the call."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.__class__ = _Mixing


class _Extra(nn.Linear):
    """A layer that can be told how much it counts."""

    def forward(self, rows: Tensor, scale: float | None = None) -> Tensor:
        return super().forward(rows) * (scale or 1)


class _ForLongRows(nn.Module):
    def __init__(self, mlp: nn.Module, width: int, **told: float) -> None:
        super().__init__()
        self.mlp, self.extra, self.told = mlp, _Extra(width, width), told

    def forward(self, rows: Tensor) -> Tensor:
        own = self.mlp(rows)
        return own if rows.size(1) < 10 else own + 0 * self.extra(rows, **self.told)


class CallingForLongRows(Qwen3ForCausalLM):
    """A layer that short samples leave out."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].mlp = _ForLongRows(self.model.layers[1].mlp, config.hidden_size)


class TellingForLongRows(Qwen3ForCausalLM):
    """The same, with an argument that is no tensor."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].mlp = _ForLongRows(self.model.layers[1].mlp, config.hidden_size, scale=2.0)
