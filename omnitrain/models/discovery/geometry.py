"""Find the sizes of the smallest inputs of a model's towers in its config, by customary key names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from omnitrain.ops.config_value import config_value

_PATCH = ("patch_size", "vit_patch_size")
_SIDE = ("image_size", "img_size", "max_image_size", "resolution", "input_size")
_CHANNELS = ("num_channels", "in_channels", "in_chans", "n_channels")
_TEMPORAL = ("temporal_patch_size",)
_MERGE = ("spatial_merge_size", "merge_size", "merge_kernel_size", "hidden_stride", "pooling_kernel_size")
_SHRINK = ("spatial_merge_size", "downsample_factor", "scale_factor", "pixel_shuffle_factor", "downsample_ratio")
_MEL = ("num_mel_bins", "n_mels", "input_feat_size", "feature_size", "num_mel_filters", "input_dim", "num_features")
_CUSTOMARY_BINS = (128, 80)
_WINDOW = ("n_window",)
_SOURCE = ("max_source_positions",)
_KINDS = {
    "image": ("vision", "image", "visual", "vq"),
    "video": ("video", "vision", "visual"),
    "audio": ("audio", "encoder", "speech"),
}


@dataclass(frozen=True)
class VisionSizes:
    """Sizes of a vision tower."""

    patch: int  # side of a patch in pixels
    side: int  # side of a fixed-size image in pixels
    channels: int  # number of channels of an image
    temporal: int  # number of frames in a patch
    merge: int  # number of patches along a side that become one feature
    unit: int  # height and width are multiples of this number of patches


@dataclass(frozen=True)
class AudioSizes:
    """Sizes of an audio tower."""

    bins: int  # number of frequency bins of a spectrogram
    chunk: int  # lengths are multiples of this number of frames
    full_frames: int | None  # number of frames of a clip, if the tower takes only one length; None: any length


def config_nodes(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return the config and all configs in it, outermost first."""
    return [node for _, node in _named_nodes(config)]


def vision_sizes(config: PreTrainedConfig, modality: str) -> VisionSizes:
    """Return the sizes of the tower for images or videos; customary values if the config has none."""
    return _vision_sizes([*_nodes_for(config, modality), config])


def high_resolution_sizes(config: PreTrainedConfig) -> VisionSizes | None:
    """Return the sizes of a second tower, for the same images in high resolution; None if the model has none."""
    nodes = [node for name, node in _named_nodes(config) if "high_res" in name]
    return _vision_sizes([*nodes, config]) if nodes else None


def _vision_sizes(nodes: list[PreTrainedConfig]) -> VisionSizes:
    patch = _integer(_first(nodes, _PATCH), 14)
    side = _integer(_first(nodes, _SIDE), 0)
    merge = _integer(_first(nodes, _MERGE), 1)
    shrink = math.prod(max(1, _inverse(_first(nodes, (name,), 1))) for name in _SHRINK)
    unit = max(merge, shrink)
    return VisionSizes(
        patch=patch,
        side=side or 2 * unit * patch,
        channels=_integer(_first(nodes, _CHANNELS), 3),
        temporal=_integer(_first(nodes, _TEMPORAL), 1),
        merge=merge,
        unit=unit,
    )


def audio_sizes(config: PreTrainedConfig) -> list[AudioSizes]:
    """Return the possible sizes of the audio tower; several if the config does not name the number of bins."""
    nodes = [*_nodes_for(config, "audio"), config]
    bins = _first(nodes, _MEL)
    positions = _first(nodes, _SOURCE)
    chunk, full_frames = 2 * _integer(_first(nodes, _WINDOW), 4), None if positions is None else 2 * positions
    choices = (bins,) if bins is not None else dict.fromkeys((*_CUSTOMARY_BINS, *_numbers(nodes[:-1])))
    return [AudioSizes(_integer(choice, 80), chunk, full_frames) for choice in choices]


def _named_nodes(config: PreTrainedConfig) -> Iterator[tuple[str, PreTrainedConfig]]:
    yield "", config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            for inner, node in _named_nodes(value):
                yield f"{name}.{inner}".rstrip("."), node


def _nodes_for(config: PreTrainedConfig, modality: str) -> list[PreTrainedConfig]:
    """The configs of the modality's tower, found by their names."""
    nodes = [(name.lower(), node) for name, node in _named_nodes(config) if name and "high_res" not in name]
    return [node for kind in _KINDS[modality] for name, node in nodes if kind in name]


def _first(nodes: list[PreTrainedConfig], names: tuple[str, ...], default: Any = None) -> Any:
    values = (config_value(node, name) for node in nodes for name in names)
    return next((value for value in values if value is not None), default)


def _numbers(nodes: list[PreTrainedConfig]) -> Iterator[int]:
    """All integers in these configs that may be a number of spectrogram bins."""
    values = [value for node in nodes for value in vars(node).values()]
    numbers = (number for value in values for number in (value if isinstance(value, (list, tuple)) else (value,)))
    yield from (number for number in numbers if type(number) is int and 4 <= number <= 256)


def _integer(value: Any, default: int) -> int:
    if isinstance(value, dict):
        value = value.get("height", value.get("longest_edge", default))
    while isinstance(value, (list, tuple)):
        value = value[-1] if value else default
    return default if value is None else int(value)


def _inverse(value: Any) -> int:
    """Return a factor as an integer: 2, 0.5 and (2, 2) all give 2."""
    factor = value[-1] if isinstance(value, (list, tuple)) else value
    return round(1 / factor) if 0 < factor < 1 else int(factor)
