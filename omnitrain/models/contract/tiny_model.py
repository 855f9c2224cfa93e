"""Build a tiny model: the same class and hidden widths, fewer layers, experts and tokens, and peaked weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.models.discovery import config_nodes, init_peaked_
from omnitrain.ops.config_value import config_value
from omnitrain.torch_private import Dropout
from omnitrain.transformers_private import set_attention

# Keys that count layers.
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
_TOWER_DEPTHS = (*_DEPTHS, "depth", "encoder_layers")
# Keys that count the last layers, which take keys and values from earlier ones.
_SHARING = ("num_kv_shared_layers",)
# Keys for layers that differ by index (the first layers are dense, every nth layer has experts).
_FIRST_LAYERS = ("first_k_dense_replace", "decoder_sparse_step", "interleave_moe_layer_step", "num_dense_layers")
_TINY_TOWER_DEPTH = 3  # so that an index from the end (feature layer -2) has a layer before it
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk")
# Lengths above which a language model computes differently: windows, other scales or frequencies.
_THRESHOLDS = (
    "sliding_window",
    "attention_chunk_size",
    "attention_window_size",
    "floor_scale",
    "index_topk",
    "keep_window_size",
    "window_size",
)
TINY_THRESHOLD = 8
# Inner widths of MLPs, which hold most of a layer's weights; no other module depends on them.
_INNER_WIDTHS = ("intermediate_size", "ffn_dim", "mlp_dim", "n_inner", "ffn_hidden_size")
_RANDOM = ("drop", "jitter")
_TOKEN_SUFFIXES = ("_token_id", "_token_ids", "_token_index", "_token_idx")

# A vocabulary up to this size stays as it is.
TINY_VOCABULARY = 512
_TINY_EXPERTS, _TINY_CHOSEN_EXPERTS = 4, 2
TINY_INNER_WIDTH = 256


def tiny_config(
    config: PreTrainedConfig, *, cut_towers: bool = True, cut_mlps: bool = True, least_layers: int = 2
) -> PreTrainedConfig:
    """Return a copy of a config with the same hidden widths that is quick to build.

    The language model keeps the first layers, as many as it needs to have each kind of layer, and ``least_layers`` if
    it has them; at most four experts per routing group, and a few hundred tokens of vocabulary; special tokens get new
    ids in it. Windows and other length thresholds are cut to a few tokens, so that a short sample exceeds them. Dropout
    and other random draws in training are off.

    ``cut_towers``: towers keep only their first layers; layers that a list names by index (full attention, side
    features) become the first layers. ``cut_mlps``: MLPs of the language model, and of towers that are cut, get a small
    inner width.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    # Each level of side features enters after a different layer.
    levels = [
        len(v)
        for node in config_nodes(small)
        for k, v in vars(node).items()
        if "deepstack" in k and isinstance(v, list)
    ]
    _cut_depth(text, least=max(least_layers, 1 + max(levels, default=1)))
    towers = [node for node in config_nodes(small) if node is not text and node is not small] if cut_towers else []
    for tower in towers:
        _cut_tower(tower)
    for node in (text, *towers) if cut_mlps else ():
        for name, value in list(vars(node).items()):
            if name.endswith(_INNER_WIDTHS) and isinstance(value, int) and value > TINY_INNER_WIDTH:
                setattr(node, name, TINY_INNER_WIDTH)
    _cut_experts(text)
    _cut_thresholds(text)
    for node in config_nodes(small):
        for name in _random_keys(node):
            setattr(node, name, 0.0)
    _cut_vocabulary(small)
    return small


def tiny_configs(config: PreTrainedConfig, least_layers: int = 2) -> list[PreTrainedConfig]:
    """Return three configs: the smallest, one with all layers of towers, and one with full MLPs, too.

    The larger ones serve models whose config ties other sizes to those that :func:`tiny_config` cuts.
    """
    return [
        tiny_config(config, least_layers=least_layers),
        tiny_config(config, cut_towers=False, least_layers=least_layers),
        tiny_config(config, cut_towers=False, cut_mlps=False, least_layers=least_layers),
    ]


def drawn_in_training(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the keys of the language model's config that turn on dropout or other random draws in training."""
    return _drawn(config.get_text_config(decoder=True))


def draws_in_training(model: PreTrainedModel) -> bool:
    """Whether a model draws random numbers in training, such as those of dropout, by the keys that we know."""
    modules = (module for module in model.modules() if isinstance(module, Dropout))
    return any(_drawn(node) for node in config_nodes(model.config)) or any(module.p for module in modules)


def _drawn(node: PreTrainedConfig) -> tuple[str, ...]:
    return tuple(name for name in _random_keys(node) if getattr(node, name))


def _random_keys(node: PreTrainedConfig) -> list[str]:
    return [k for k, value in vars(node).items() if isinstance(value, float) and any(word in k for word in _RANDOM)]


def build_tiny_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build ``model_class`` from ``config`` in fp32 on the CPU, with weights that make each layer matter to the output.

    HF's initial weights (standard deviation 0.02) make attention uniform, which hides wrong masks and positions, so we
    draw other weights.
    """
    config = copy.deepcopy(config)
    for node in config_nodes(config):
        set_attention(node, None)  # let transformers choose, not the full model's setting
    with torch.random.fork_rng(devices=[]), _SkipInit():
        torch.manual_seed(0)
        model = model_class(config).float()
    init_peaked_(model)
    without_dropout(model)
    return model


def without_dropout(model: nn.Module) -> None:
    """Turn off all dropout of a model."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0


def tower_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a tower's config with only its first layers, see :func:`tiny_config`; ``config`` is not changed."""
    small = copy.deepcopy(config)
    for node in config_nodes(small):
        _cut_tower(node)
    return small


def sizes(config: PreTrainedConfig) -> dict[str, int]:
    """Return the language model's sizes that a tiny model cuts: ``layers``, ``experts``, ``vocabulary rows``."""
    text = config.get_text_config(decoder=True)
    names = {"layers": _first(text, _DEPTHS), "experts": _first(text, _EXPERTS), "vocabulary rows": "vocab_size"}
    return {what: getattr(text, name) for what, name in names.items() if name is not None}


def moved_tokens(config: PreTrainedConfig, tiny: PreTrainedConfig) -> dict[int, int]:
    """Return special token id of ``config`` -> its id in the tiny model's config."""
    return {
        old: new
        for node, small in zip(config_nodes(config), config_nodes(tiny), strict=True)
        for (_, olds), (_, news) in zip(_tokens(node), _tokens(small), strict=True)
        for old, new in zip(olds, news, strict=True)
    }


class _SkipInit(TorchFunctionMode):
    """Skips the initialization of matrices: they are all drawn again, and it takes most of the time of a build."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else kwargs.get("tensor")
        if func.__name__ in _DRAWS and isinstance(tensor, torch.nn.Parameter) and tensor.ndim >= 2:
            return tensor
        return func(*args, **kwargs)


_DRAWS = {f"{prefix}{kind}_" for prefix in ("", "kaiming_", "xavier_", "trunc_") for kind in ("normal", "uniform")}


def _cut_depth(text: PreTrainedConfig, least: int) -> None:
    name = _first(text, _DEPTHS)
    if name is None:
        return
    depth: int = getattr(text, name)
    if least >= depth:
        return
    lists = {k: v for k, v in vars(text).items() if isinstance(v, (list, tuple)) and len(v) == depth}
    per_layer = _per_layer_values(text, depth)
    kinds = list(zip(*lists.values(), per_layer, strict=True))
    least = max(least, *(int(config_value(text, key) or 0) + 1 for key in _FIRST_LAYERS))
    sharing = _first(text, _SHARING)
    first_sharing = depth - (getattr(text, sharing) if sharing else 0)
    shared = range(first_sharing, first_sharing + _up_to_last_kind(kinds[first_sharing:]))
    kept = [*range(min(first_sharing, max(least, _up_to_last_kind(kinds[:first_sharing])))), *shared]
    if len(kept) >= depth:
        return
    for key, values in lists.items():
        setattr(text, key, type(values)(values[index] for index in kept))
    if sharing:
        setattr(text, sharing, len(shared))
    if any(per_layer):
        text.per_layer_config = None
    setattr(text, name, len(kept))
    if any(per_layer):
        text.per_layer_config = {new: per_layer[index] for new, index in enumerate(kept)}


def _up_to_last_kind(kinds: Sequence[Any]) -> int:
    """The number of first layers that contain a layer of each kind."""
    return max((index + 1 for index, kind in enumerate(kinds) if kind not in kinds[:index]), default=0)


def _per_layer_values(text: PreTrainedConfig, depth: int) -> list[dict[str, Any]]:
    """The values of each layer that differ between layers (transformers' ``per_layer_config``)."""
    names = getattr(text, "per_layer_attributes", None)
    if names is None:
        return [{} for _ in range(depth)]
    return [{name: getattr(layer, name) for name in ("skip", *sorted(names))} for layer in text.per_layer_config]


def _cut_tower(node: PreTrainedConfig) -> None:
    """Keep as many layers as a list names by index, and one layer that it does not name."""
    name = _first(node, _TOWER_DEPTHS)
    if name is None:
        return
    depth: int = getattr(node, name)
    values = {k: list(v) for k, v in vars(node).items() if isinstance(v, (list, tuple)) and v}
    named = {k: v for k, v in values.items() if "index" in k and all(isinstance(i, int) and 0 <= i < depth for i in v)}
    kept = max([_TINY_TOWER_DEPTH, *(len(indices) + 1 for indices in named.values())])
    if kept >= depth:
        return
    for key, indices in named.items():
        setattr(node, key, list(range(len(indices))))
    for key, per_layer in values.items():
        if len(per_layer) == depth and key not in named:
            setattr(node, key, per_layer[:kept])
    setattr(node, name, kept)


def _cut_thresholds(text: PreTrainedConfig) -> None:
    for name in _THRESHOLDS:
        if isinstance(value := config_value(text, name), int) and value > TINY_THRESHOLD:
            setattr(text, name, TINY_THRESHOLD)
    rope = config_value(text, "rope_parameters") or {}
    for values in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        if values.get("rope_type") == "longrope":
            values["original_max_position_embeddings"] = TINY_THRESHOLD
            text.original_max_position_embeddings = TINY_THRESHOLD  # transformers sets the rope value from it
        elif values.get("rope_type") == "dynamic":
            text.max_position_embeddings = TINY_THRESHOLD


def _cut_experts(text: PreTrainedConfig) -> None:
    groups = int(config_value(text, "n_group") or 1)
    for names, most in ((_EXPERTS, _TINY_EXPERTS * groups), (CHOSEN_EXPERTS, _TINY_CHOSEN_EXPERTS)):
        for name in names:
            if isinstance(value := config_value(text, name), int) and value > most:
                setattr(text, name, most)


def _cut_vocabulary(config: PreTrainedConfig) -> None:
    nodes = config_nodes(config)
    special = sorted({token for node in nodes for _, values in _tokens(node) for token in values})
    text = config.get_text_config(decoder=True)
    if text.vocab_size <= TINY_VOCABULARY and all(token < text.vocab_size for token in special):
        return
    moved = {token: TINY_VOCABULARY - 1 - index for index, token in enumerate(special)}
    for node in nodes:
        for name, values in _tokens(node):
            new = [moved[token] for token in values]
            setattr(node, name, new if isinstance(getattr(node, name), (list, tuple)) else new[0])
    full = text.vocab_size
    for node in nodes:
        for name, value in list(vars(node).items()):
            if name.startswith("vocab_size") and value == full:
                setattr(node, name, TINY_VOCABULARY)


def _tokens(node: PreTrainedConfig) -> list[tuple[str, list[int]]]:
    """``(attribute, token ids)`` of every special token that ``node`` names."""
    tokens: list[tuple[str, list[int]]] = []
    for name, value in vars(node).items():
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if name.endswith(_TOKEN_SUFFIXES) and values and all(isinstance(token, int) and token >= 0 for token in values):
            tokens.append((name, values))
    return tokens


def _first(node: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(config_value(node, name), int)), None)
