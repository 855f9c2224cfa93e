"""Small configs of any HuggingFace model type, by the names that configs use for sizes. No model type is named here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY = 300
_IMAGE, _HEADS, _LENGTH = 16, 4, 512
_MOST_LAYERS = 8
_ORDINARY = 200
"""Special tokens from here on move into the small vocabulary."""

_DEPTH = re.compile(
    r"^((num|n)_(hidden_|encoder_|decoder_)?(layers?|blocks)(_per_stack)?|(encoder_|decoder_)?layers|\w*depth)$"
)
_KINDS = ("layers_block_type", "layer_types")
_NUM_HEADS = re.compile(r"(^|_)(num|n|attention)_(\w+_)?heads?$")
_TOKEN = re.compile(r"(_token|_start|_end|_pad|_placeholder)_(id|ids|index|idx)$")
_RANDOM = re.compile(r"drop|jitter")
_LABELS = ("id2label", "label2id", "dtype")
# Sizes that may be as large as they are.
_SIZES = re.compile(
    r"image|patch|window|chunk|kernel|block|crop|tile|grid|position|max_|num_|stride|merge|codebook|in_channels|"
    r"out_channels|input_feat|feature_size|frame|bins|group|mel|_of$|action|scale"
)
_WIDTH = re.compile(r"(size|dims?|width|rank|d_model|n_embd|channels?|d_ff|dff|inner|d_ssm)$")


@dataclass(frozen=True)
class _Shrink:
    """One way to make a config small.

    Attributes:
        head_dim: of attention; models are four heads wide.
        filled: numbers that the default config leaves out (None) are given.
        tokens: special token -> its place in the small vocabulary.
    """

    head_dim: int
    filled: bool
    tokens: dict[int, int]

    def limits(self) -> dict[str, int]:
        """Pattern of whole names -> the largest value; the first that matches counts."""
        return {
            r"(\w*_)?vocab_size(_per_layer_input)?": VOCABULARY,
            r"qk_(nope|rope)_head_dim|rotary_dim": self.head_dim // 2,
            r"topk_group": 1,
            r"n_group|num_expert_group|n_groups|o_groups": 2,
            r"\w*(experts_per_tok(en)?|moe_k|moe_topk|top_k_experts)|index_topk_blocks": 2,
            r"\w*(num|n)_\w*experts|zero_expert_num|index_kpool|patch_size|vit_patch_size": 4,
            r"mm_tokens_per_image|vision_soft_tokens_per_image": 4,
            r"index_topk|\w*window\w*|attention_chunk_size|floor_scale|local_attention": 8,
            r"first_k_dense_replace": 1,
            r"(\w*_)?(max_position_embeddings|n_positions|max_source_positions|n_ctx|max_seq_len)": _LENGTH,
            r"image_size|img_size": _IMAGE,
            r"num_position_embeddings|num_embeddings": 64,
            r"\w*(intermediate|ffn|d_ff|dff|inner|mlp_dim|feed_forward|dim_ff)\w*": 2 * self.hidden,
            r"\w*(head_?dim|dim_head|d_head|head_size|d_kv|kv_channels)\w*": self.head_dim,
        }

    def fillings(self) -> dict[str, int]:
        """Values of numbers that are left out."""
        return {"head_dim": self.head_dim, "num_key_value_heads": _HEADS, "sliding_window": 8} | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
        }

    @property
    def hidden(self) -> int:
        return _HEADS * self.head_dim

    def config(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values of a config, and of all configs in it."""
        small = {name: self._value(name, value, values) for name, value in values.items() if name not in _LABELS}
        if self.filled:
            small |= {name: value for name, value in self.fillings().items() if name in small and small[name] is None}
        self._heads(small, values)
        _cut_layers(small)
        return small

    def _value(self, name: str, value: Any, beside: dict[str, Any]) -> Any:
        if isinstance(value, dict):
            return self._rotary(value, beside) if name.startswith("rope") else self.config(value)
        if name == "image_grid_pinpoints":
            return _tiles(value) if value else value
        if isinstance(value, (list, tuple)):
            return [self._value(name, item, beside) for item in value]
        if isinstance(value, float):
            return 0.0 if _RANDOM.search(name) else value
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if _TOKEN.search(name):
            return self.tokens.get(value, value)
        limit = next((limit for pattern, limit in self.limits().items() if re.fullmatch(pattern, name)), None)
        if limit is None and _WIDTH.search(name) and not _SIZES.search(name):
            limit = self.hidden
        return value if limit is None else min(value, limit)

    def _rotary(self, values: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
        """Sections of rotary positions divide half a head."""
        small = {
            key: self._rotary(inner, beside) if isinstance(inner, dict) else inner for key, inner in values.items()
        }
        if sections := values.get("mrope_section"):
            width = beside.get("head_dim") or beside["hidden_size"] // beside["num_attention_heads"]
            total = sum(sections) * self.head_dim // width
            rest = [total * section // sum(sections) for section in sections[1:]]
            small["mrope_section"] = [total - sum(rest), *rest]
        return small

    def _heads(self, small: dict[str, Any], values: dict[str, Any]) -> None:
        """Four heads; two of those of which there are fewer; eight where heads fill the width twice."""
        numbers = {name: value for name, value in values.items() if _NUM_HEADS.search(name) and type(value) is int}
        for name, value in numbers.items():
            small[name] = min(value, _HEADS if value == max(numbers.values()) else _HEADS // 2)
            width = values.get(re.sub("num_heads", "head_dim", re.sub("n_heads", "d_head", name)))
            expand = values.get("expand", values.get("mamba_expand"))
            if isinstance(width, int) and expand and value * width == expand * values.get("hidden_size", 0):
                small[name] = expand * _HEADS
        if values.get("head_dim") and values["head_dim"] == values.get("qk_rope_head_dim"):
            small["head_dim"] = small["qk_rope_head_dim"]


def small_configs(model_type: str) -> Iterator[PreTrainedConfig]:
    """Small variants of the default config of ``model_type``, the smallest first, with nothing random in training.

    Raises:
        Exception: what the config class says of its own default; a variant that it refuses is left out.
    """
    config_class = CONFIG_MAPPING[model_type]
    values = config_class().to_dict()
    refused: list[Exception] = []
    for head_dim in (16, 64, 128):
        for filled in (False, True):
            try:
                yield config_class(**_Shrink(head_dim, filled, _token_map(values)).config(values))
            except Exception as error:
                refused.append(error)
    if len(refused) == 6:
        raise refused[0]


def _tiles(pinpoints: list[list[int]]) -> list[list[int]]:
    """Tile grids for small images: a tile is as large as the smallest side of one."""
    tile = min(side for pair in pinpoints for side in pair)
    return [[_IMAGE * (side // tile) for side in pair] for pair in pinpoints if max(pair) <= 2 * tile]


def _token_map(values: dict[str, Any]) -> dict[int, int]:
    """Special tokens beyond the small vocabulary -> the last ones of it."""
    tokens = sorted({token for token in _special_tokens(values) if token >= _ORDINARY})
    return {token: VOCABULARY - 1 - place for place, token in enumerate(tokens)}


def _special_tokens(values: dict[str, Any]) -> Iterator[int]:
    for name, value in values.items():
        if isinstance(value, dict) and name not in _LABELS:
            yield from _special_tokens(value)
        elif _TOKEN.search(name):
            yield from (token for token in (value if isinstance(value, list) else [value]) if type(token) is int)


def _cut_layers(small: dict[str, Any]) -> None:
    """The first layers, up to the last one of a new kind; lists of a value per layer, and of layers, follow.

    Where no number tells the depth, a list of the layers' kinds does.
    """
    for name in [name for name, value in small.items() if _DEPTH.match(name) and type(value) is int] or ["layers"]:
        kinds_alone = next((small[key] for key in _KINDS if small.get(key)), [])
        depth = small.get(name, len(kinds_alone))
        lists = {key: value for key, value in small.items() if isinstance(value, list) and len(value) == depth}
        kinds = [str(kind) for kind in zip(*lists.values(), strict=True)]
        kept = min(depth, _MOST_LAYERS, max([2, *(i + 1 for i, kind in enumerate(kinds) if kind not in kinds[:i])]))
        if name in small:
            small[name] = kept
        small |= {key: value[:kept] for key, value in lists.items()}
        if layers := small.get("per_layer_config"):
            small["per_layer_config"] = {key: value for key, value in layers.items() if int(key) < kept}
