"""Build a tiny model: the same class and hidden widths, fewer layers, experts and tokens, and peaked weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.models.discovery import config_nodes
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
    *("sliding_window", "attention_chunk_size", "attention_window_size", "keep_window_size", "window_size"),
    *("floor_scale", "index_topk"),
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

    The language model keeps the first layers, one of each kind at least and ``least_layers`` if it has them; at most
    four experts per routing group; a small vocabulary, in which special tokens get new ids. Lengths such as windows are
    cut to a few tokens, which a short sample exceeds. Nothing is drawn at random. ``cut_towers``: towers keep only
    their first layers; those that a list names by index become the first. ``cut_mlps``: MLPs get a small inner width.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    # Each level of side features enters after a different layer.
    _cut_depth(text, least=max(least_layers, 1 + _num_levels(small)))
    towers = [node for node in config_nodes(small) if node is not text and node is not small] if cut_towers else []
    for tower in towers:
        _cut_tower(tower)
    for node in (text, *towers) if cut_mlps else ():
        _cap(node, [name for name in vars(node) if name.endswith(_INNER_WIDTHS)], TINY_INNER_WIDTH)
    _cap(text, _EXPERTS, _TINY_EXPERTS * int(config_value(text, "n_group") or 1))
    _cap(text, CHOSEN_EXPERTS, _TINY_CHOSEN_EXPERTS)
    _cap(text, _THRESHOLDS, TINY_THRESHOLD)
    _cut_positions(text)
    for node in config_nodes(small):
        _cap(node, _random_keys(node), 0.0)
    if getattr(small, "vocabulary_map", None) is None:  # else the model's own tables have all ids
        _cut_vocabulary(small)
    return small


def tiny_configs(config: PreTrainedConfig, least_layers: int = 2) -> list[PreTrainedConfig]:
    """Return three configs: the smallest, one with whole towers, and one with full MLPs, too."""
    return [
        tiny_config(config, least_layers=least_layers),
        tiny_config(config, cut_towers=False, least_layers=least_layers),
        tiny_config(config, cut_towers=False, cut_mlps=False, least_layers=least_layers),
    ]


def drawn_in_training(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the keys of the language model's config that turn on dropout or other random draws in training."""
    node = config.get_text_config(decoder=True)
    return tuple(name for name in _random_keys(node) if getattr(node, name))


def draws_in_training(model: PreTrainedModel) -> bool:
    """Whether a model draws random numbers in training, such as dropout's, by the keys that we know."""
    drawn = any(getattr(node, name) for node in config_nodes(model.config) for name in _random_keys(node))
    return drawn or any(module.p for module in model.modules() if isinstance(module, Dropout))


def _random_keys(node: PreTrainedConfig) -> list[str]:
    return [k for k, value in vars(node).items() if isinstance(value, float) and any(word in k for word in _RANDOM)]


def build_tiny_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build ``model_class`` in fp32, with peaked weights, since HF's hide wrong masks and positions."""
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
        for olds, news in zip(_tokens(node).values(), _tokens(small).values(), strict=True)
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


def _num_levels(config: PreTrainedConfig) -> int:
    entries = [entry for node in config_nodes(config) for entry in vars(node).items()]
    return max((len(value) for name, value in entries if "deepstack" in name and isinstance(value, list)), default=1)


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
        return [{}] * depth
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


def _cap(node: PreTrainedConfig, names: Sequence[str], most: float) -> None:
    for name in names:
        if isinstance(value := config_value(node, name), int | float) and value > most:
            setattr(node, name, most)


def _cut_positions(text: PreTrainedConfig) -> None:
    """Cut the lengths above which the frequencies of positions change."""
    rope = config_value(text, "rope_parameters") or {}
    for values in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        if values.get("rope_type") == "longrope":
            values["original_max_position_embeddings"] = TINY_THRESHOLD
            text.original_max_position_embeddings = TINY_THRESHOLD  # transformers sets the rope value from it
        elif values.get("rope_type") == "dynamic":
            text.max_position_embeddings = TINY_THRESHOLD


def _cut_vocabulary(config: PreTrainedConfig) -> None:
    nodes = config_nodes(config)
    special = sorted({token for node in nodes for values in _tokens(node).values() for token in values})
    text = config.get_text_config(decoder=True)
    if text.vocab_size <= TINY_VOCABULARY and all(token < text.vocab_size for token in special):
        return
    moved = {token: TINY_VOCABULARY - 1 - index for index, token in enumerate(special)}
    full = text.vocab_size
    for node in nodes:
        for name, values in _tokens(node).items():
            new = [moved[token] for token in values]
            setattr(node, name, new if isinstance(getattr(node, name), (list, tuple)) else new[0])
        for name in [name for name, value in vars(node).items() if name.startswith("vocab_size") and value == full]:
            setattr(node, name, TINY_VOCABULARY)


def _tokens(node: PreTrainedConfig) -> dict[str, list[int]]:
    """Attribute -> token ids, of every special token that ``node`` names."""
    named = {name: value for name, value in vars(node).items() if name.endswith(_TOKEN_SUFFIXES)}
    ids = {name: list(value) if isinstance(value, (list, tuple)) else [value] for name, value in named.items()}
    return {name: each for name, each in ids.items() if each and all(isinstance(i, int) and i >= 0 for i in each)}


def _first(node: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(config_value(node, name), int)), None)


@torch.no_grad()
def init_peaked_(model: nn.Module) -> None:
    """Draw all weights again, in place, by names and shapes: attention is peaked, norms and biases matter.

    Matrices have a gain of 1.5 over their fan-in (embeddings: variance 1), vectors are around 1 (if ones) or 0.
    """
    for index, (_, parameter) in enumerate(sorted(model.named_parameters())):
        generator = torch.Generator().manual_seed(index)
        if parameter.ndim < 2:
            center = 1.0 if parameter.numel() and bool((parameter == 1).all()) else 0.0
            parameter.normal_(center, 0.2, generator=generator)
        else:
            parameter.normal_(0.0, 1.5 / math.sqrt(parameter[0].numel()), generator=generator)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            generator = torch.Generator().manual_seed(-1)
            module.weight.normal_(generator=generator)
