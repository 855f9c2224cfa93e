"""Small configs of any HuggingFace model type, by the names that configs use for sizes. No model type is named here."""

from __future__ import annotations

import re
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY = 300
_HIDDEN, _HEADS, _HEAD_DIM = 64, 4, 16
_MOST_LAYERS = 8
_LABELS = ("id2label", "label2id", "dtype")

_DEPTH = re.compile(r"^((num|n)_(hidden_|encoder_|decoder_)?(layers?|blocks)|(encoder_|decoder_)?layers|\w*depth)$")
_TOKEN = re.compile(r"(_token|_start|_end|_pad|_placeholder)_(id|ids|index|idx)$")
_RANDOM = re.compile(r"drop|jitter")
_WIDE = re.compile(r"(size|dims?|width|rank|d_model|n_embd|channels?|d_ff|dff|inner|d_ssm|proj_size)$")
_NO_WIDTH = re.compile(
    r"image|patch|vocab|window|chunk|kernel|block|crop|tile|grid|position|max_|num_|^n_|stride|merge|codebook|"
    r"in_channels|out_channels|input_feat|feature_size|frame|bins|group|mel|_of$|action|scale"
)
_HEAD_WIDTH = re.compile(r"head_?dim|dim_head|d_head|head_size|d_kv|kv_channels")
# The first pattern that a whole name matches gives the largest value.
_LIMITS: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), value)
    for pattern, value in (
        (r"(\w*_)?vocab_size(_per_layer_input)?", VOCABULARY),
        (r"qk_(nope|rope)_head_dim|rotary_dim", _HEAD_DIM // 2),
        (r"topk_group", 1),
        (r"n_group|num_expert_group|n_groups|o_groups", 2),
        (r"\w*(experts_per_tok(en)?|moe_k|moe_topk|top_k_experts)", 2),
        (r"\w*(num|n)_\w*experts|zero_expert_num", 4),
        (r"index_topk_blocks", 2),
        (r"index_topk|\w*window\w*|attention_chunk_size|floor_scale|local_attention", 8),
        (r"first_k_dense_replace", 1),
        (r"(\w*_)?(max_position_embeddings|n_positions|max_source_positions|n_ctx|max_seq_len)", 512),
        (r"image_size|img_size", 16),
        (r"patch_size|vit_patch_size", 4),
        (r"mm_tokens_per_image|vision_soft_tokens_per_image", 4),
        (r"num_position_embeddings|num_embeddings", 64),
        (r"\w*(intermediate|ffn|d_ff|dff|inner|mlp_dim|feed_forward|dim_ff)\w*", 2 * _HIDDEN),
    )
)


def shrunk_config(model_type: str) -> PreTrainedConfig:
    """The default config of ``model_type``, a few layers deep and at most 128 wide, with nothing random in training.

    Raises:
        Exception: whatever the config class says about it.
    """
    config_class = CONFIG_MAPPING[model_type]
    values = config_class().to_dict()
    return config_class(**_shrunk(values, _token_map(values)))


def _shrunk(values: dict[str, Any], tokens: dict[int, int]) -> dict[str, Any]:
    small = {name: _value(name, value, values, tokens) for name, value in values.items() if name not in _LABELS}
    _shrink_depth(small)
    _shrink_heads(small, values)
    return small


def _value(name: str, value: Any, beside: dict[str, Any], tokens: dict[int, int]) -> Any:
    if isinstance(value, dict):
        return _shrunk(value, tokens) if "model_type" in value else _rotary(name, value, beside)
    if isinstance(value, (list, tuple)) and not _TOKEN.search(name):
        return [_value(name, item, beside, tokens) for item in value]
    if isinstance(value, float):
        return 0.0 if _RANDOM.search(name) else value
    if isinstance(value, (list, tuple)):
        return [tokens.get(token, token) for token in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return tokens.get(value, value) if _TOKEN.search(name) else _number(name, value)


def _number(name: str, value: int) -> int:
    for pattern, limit in _LIMITS:
        if pattern.fullmatch(name):
            return min(value, limit)
    if _HEAD_WIDTH.search(name):
        return min(value, _HEAD_DIM)
    if _WIDE.search(name) and not _NO_WIDTH.search(name):
        return min(value, _HIDDEN)
    return value


def _rotary(name: str, values: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    """Sections of rotary positions divide half a head."""
    small = {key: _rotary(key, inner, beside) if isinstance(inner, dict) else inner for key, inner in values.items()}
    if sections := values.get("mrope_section"):
        width = beside.get("head_dim") or beside["hidden_size"] // beside["num_attention_heads"]
        total = sum(sections) * _HEAD_DIM // width
        rest = [total * section // sum(sections) for section in sections[1:]]
        small["mrope_section"] = [total - sum(rest), *rest]
    return small


def _token_map(values: dict[str, Any]) -> dict[int, int]:
    """Special tokens beyond the small vocabulary -> the last ones of it."""
    found: set[int] = set()
    for name, value in values.items():
        if name in _LABELS:
            continue
        if isinstance(value, dict):
            found |= set(_token_map(value))
        elif _TOKEN.search(name):
            found |= {token for token in (value if isinstance(value, list) else [value]) if type(token) is int}
    return {token: VOCABULARY - 1 - place for place, token in enumerate(sorted(t for t in found if t >= 200))}


def _shrink_depth(small: dict[str, Any]) -> None:
    """The first layers, up to the last one of a new kind; lists of a value per layer, and of layers, follow."""
    for name in [name for name, value in small.items() if _DEPTH.match(name) and type(value) is int]:
        depth = small[name]
        lists = {key: value for key, value in small.items() if isinstance(value, list) and len(value) == depth}
        kinds = [str(kind) for kind in zip(*lists.values(), strict=True)]
        kept = min(depth, _MOST_LAYERS, max([2, *(i + 1 for i, kind in enumerate(kinds) if kind not in kinds[:i])]))
        small[name] = kept
        for key, value in lists.items():
            small[key] = value[:kept]


def _shrink_heads(small: dict[str, Any], values: dict[str, Any]) -> None:
    """Four heads; fewer where there are fewer than others, more where they fill a multiple of the width."""
    names = [name for name, value in values.items() if re.search(r"(^|_)n?_?heads?$", name) and type(value) is int]
    most = max((values[name] for name in names), default=0)
    for name in names:
        small[name] = min(values[name], _HEADS if values[name] == most else _HEADS // 2)
