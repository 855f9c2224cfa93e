"""Make tiny valid inputs of a feature method from the names of its arguments and the config.

This module knows no model. The name of an argument defines its content (``image_grid_thw``: patches in time, height,
width). The layout of the media array is one of a few conventions; we try them in order until the model accepts one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from omnitrain.models.discovery.geometry import (
    AudioSizes,
    VisionSizes,
    audio_sizes,
    high_resolution_sizes,
    vision_sizes,
)

MAIN_ARGUMENTS = {
    "image": ("pixel_values", "pixel_values_images"),
    "video": ("pixel_values_videos",),
    "audio": ("input_features", "input_values"),
}
"""Modality -> names of the argument that holds pixels, spectrograms or waveforms."""

_WORDS = {
    "image": ("image", "pixel_values"),
    "video": ("video",),
    "audio": ("audio", "speech", *MAIN_ARGUMENTS["audio"]),
}


def media_arguments(model_class: type[PreTrainedModel], modality: str) -> tuple[str, ...]:
    """Return the arguments of the forward that belong to a modality by their names (``image_pixel_values``)."""
    names = [name for name in inspect.signature(model_class.forward).parameters if not name.startswith("use_")]
    names = [name for name in names if any(word in name for word in _WORDS[modality])]
    return tuple(name for name in names if modality != "image" or "video" not in name)


@dataclass(frozen=True)
class ProbeInput:
    """Makes inputs for the feature method of a modality."""

    modality: str  # ``image``, ``video`` or ``audio``
    main: str  # name of the argument that holds pixels, spectrograms or waveforms
    names: tuple[str, ...]  # names of all arguments to make
    layout: str  # layout of the main argument, a key of the tables below
    vision: VisionSizes  # sizes of images and videos
    audio: AudioSizes  # sizes of sound
    pinpoints: tuple[tuple[int, int], ...] = ()  # tile grids that the config allows, ``(height, width)`` in pixels
    variable: bool = True  # items differ in size (False: only in content)
    full_length: bool = False  # clips have the fixed length that the tower takes
    grid_frames: int = 1  # frames of a video in units of temporal patches
    high_resolution: VisionSizes | None = None  # sizes of a second tower for the same images

    def make(self, items: Sequence[int]) -> dict[str, Tensor]:
        """Return the arguments for these items in one call; content depends only on an item's index (fp32, CPU)."""
        shapes = [self._shape(index) for index in items]
        main = [shape.random(*_LAYOUTS[self.layout](self, shape)) for shape in shapes]
        made = {self.main: _joined(main, dim=-1 if self.layout == "strip" else 0)}
        for name in (name for name in self.names if name != self.main):
            arrays = [_COMPANIONS[name](self, shape) for shape in shapes]
            made[name] = _joined(arrays, fill=-1 if name.endswith("position_ids") else 0)
        return made

    def _shape(self, index: int) -> _Shape:
        generator = torch.Generator().manual_seed(1000 + index)
        unit = self.vision.unit
        larger = index % 2 if self.variable else 0
        if self.modality == "audio":
            full, chunk = self.audio.full_frames, self.audio.chunk
            short = chunk * -(-_SHORT_CLIP // chunk)
            return _Shape(generator, full if self.full_length and full else short * (1 + larger), 0, 0)
        frames = self.grid_frames * self.vision.temporal if self.modality == "video" else 1
        if self.layout in _FIXED_SIDE:
            patches = max(1, self.vision.side // self.vision.patch)
            return _Shape(generator, frames, patches, patches // (1 + larger))
        return _Shape(generator, frames, 2 * unit, 2 * unit * (1 + larger))


@dataclass(frozen=True)
class _Shape:
    """One item: frames (of a video or of a spectrogram), patches along height and width."""

    generator: torch.Generator = field(repr=False)
    frames: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        """Number of patches of a frame."""
        return self.height * self.width

    def random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator) * 2 - 1


def _joined(arrays: Sequence[Tensor], dim: int = 0, fill: int = 0) -> Tensor:
    """Concatenate the arrays of items; other dims are padded to the longest."""
    longest = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    padded = []
    for array in arrays:
        longest[dim] = array.size(dim)
        padded.append(array.new_full(longest, fill))
        padded[-1][tuple(slice(0, size) for size in array.shape)] = array
    return torch.cat(padded, dim)


def candidates(config: PreTrainedConfig, modality: str, main: str, accepted: Sequence[str]) -> Iterator[ProbeInput]:
    """Yield ways to make inputs of a feature method from arguments ``accepted`` by the forward, likeliest first."""
    companions = tuple(name for name in accepted if name in _COMPANIONS_OF[modality])
    choices = [companions, *(tuple(n for n in companions if n != omitted) for omitted in companions), ()]
    for chosen in dict.fromkeys(choices):
        for layout in _layouts_for(modality, main, chosen):
            for sizes in _sizes(config, modality, layout):
                probe = replace(sizes, main=main, names=(main, *chosen), layout=layout)
                if _can_vary(layout, chosen):
                    yield probe
                yield replace(probe, variable=False)
                if modality == "audio" and probe.audio.full_frames:
                    yield replace(probe, variable=False, full_length=True)


def _sizes(config: PreTrainedConfig, modality: str, layout: str) -> Iterator[ProbeInput]:
    """Probes that differ only in the sizes of the items, the smallest first."""
    vision, audio = vision_sizes(config, modality), audio_sizes(config)
    pinpoints = tuple(tuple(pair) for pair in getattr(config, "image_grid_pinpoints", None) or ())
    start = ProbeInput(modality, "", (), layout, vision, audio[0], pinpoints)
    start = replace(start, high_resolution=high_resolution_sizes(config))
    if modality == "audio":
        yield from (replace(start, audio=sizes) for sizes in audio)
        return
    for grid_frames in (2, 1) if modality == "video" else (1,):
        for factor in (1,) if layout in _FIXED_SIDE else (1, 2, 4):  # times as many patches along a side
            yield replace(start, vision=replace(vision, unit=factor * vision.unit), grid_frames=grid_frames)


def _layouts_for(modality: str, main: str, names: tuple[str, ...]) -> list[str]:
    if modality == "audio":
        return ["waves", "channel waves"] if main == "input_values" else ["bins, frames", "frames, bins"]
    if any("_grid_" in name for name in names):
        return ["flat patches", "square patches", "cubes", "images"]
    if any(name in ("spatial_shapes", "image_position_ids", "video_position_ids") for name in names):
        return ["padded patches"]
    if any(name.startswith("target_sizes") for name in names):
        return ["strip", "images"]
    if modality == "video":
        return ["clips", "channel clips", "tiles", "images"]
    return ["images", "tiles", "padded patches"]


def _can_vary(layout: str, names: tuple[str, ...]) -> bool:
    if layout in ("images", "tiles"):
        return any(name.startswith(("image_sizes", "pixel_mask", "pixel_attention_mask")) for name in names)
    if layout in _AUDIO:
        return any("mask" in name for name in names)
    return layout in ("flat patches", "square patches", "cubes", "padded patches", "strip") and bool(names)


_SAMPLES_PER_FRAME = 160
_SHORT_CLIP = 96
"""Frames of a spectrogram of about a second."""
_FIXED_SIDE = ("images", "tiles", "clips", "channel clips")
_AUDIO = ("bins, frames", "frames, bins", "waves", "channel waves")
_WAVES = ("waves", "channel waves")


def _grid_frames(probe: ProbeInput, item: _Shape) -> int:
    return max(1, item.frames // probe.vision.temporal)


def _of_patches(*names: str) -> Callable[[ProbeInput, _Shape], tuple[int, ...]]:
    """All patches of an item; the dims of a patch are the products of these sizes of the tower."""

    def shape(probe: ProbeInput, item: _Shape) -> tuple[int, ...]:
        sizes = [math.prod(getattr(probe.vision, size) for size in name.split("*")) for name in names]
        return (_grid_frames(probe, item) * item.patches, *sizes)

    return shape


def _tiles(probe: ProbeInput, item: _Shape) -> tuple[int, ...]:
    side = probe.vision.side
    count = 1 + max(((height // side) * (width // side) for height, width in probe.pinpoints), default=0)
    return 1, count * item.frames, probe.vision.channels, side, side


# Layout of the main argument -> shape of the array of an item.
_LAYOUTS: dict[str, Callable[[ProbeInput, _Shape], tuple[int, ...]]] = {
    "flat patches": _of_patches("channels*temporal*patch*patch"),
    "square patches": _of_patches("channels", "patch", "patch"),
    "cubes": _of_patches("channels", "temporal", "patch", "patch"),
    "padded patches": lambda p, s: (s.frames, s.patches, p.vision.channels * p.vision.patch**2),
    "strip": lambda p, s: (1, p.vision.channels, p.vision.patch, p.vision.patch * s.patches),
    "images": lambda p, s: (1, p.vision.channels, s.height * p.vision.patch, s.width * p.vision.patch),
    "tiles": _tiles,
    "clips": lambda p, s: (1, s.frames, p.vision.channels, p.vision.side, p.vision.side),
    "channel clips": lambda p, s: (1, p.vision.channels, s.frames, p.vision.side, p.vision.side),
    "bins, frames": lambda p, s: (1, p.audio.bins, s.frames),
    "frames, bins": lambda p, s: (1, s.frames, p.audio.bins),
    "waves": lambda p, s: (1, s.frames * _SAMPLES_PER_FRAME),
    "channel waves": lambda p, s: (1, 1, s.frames * _SAMPLES_PER_FRAME),
}


def _mask(*shape: int) -> Tensor:
    return torch.ones(1, *shape, dtype=torch.bool)


def _pixel_attention_mask(probe: ProbeInput, item: _Shape) -> Tensor:
    if probe.layout == "padded patches":
        return _mask(item.patches)
    pixels = item.height * probe.vision.patch, item.width * probe.vision.patch
    return _mask(1, *pixels) if probe.layout == "tiles" else _mask(*pixels)


def _high_resolution(probe: ProbeInput, item: _Shape) -> Tensor:
    side = (probe.high_resolution or probe.vision).side
    return item.random(1, probe.vision.channels, side, side)


def _patch_positions(probe: ProbeInput, item: _Shape) -> Tensor:
    columns, rows = torch.meshgrid(torch.arange(item.width), torch.arange(item.height), indexing="xy")
    return torch.stack([columns.flatten(), rows.flatten()], -1).expand(item.frames, -1, -1)


def _frame_mask(probe: ProbeInput, item: _Shape) -> Tensor:
    return _mask(item.frames * (_SAMPLES_PER_FRAME if probe.layout in _WAVES else 1))


def _grid_thw(probe: ProbeInput, item: _Shape) -> Tensor:
    return torch.tensor([[_grid_frames(probe, item), item.height, item.width]])


def _grid_hw(probe: ProbeInput, item: _Shape) -> Tensor:
    return torch.tensor([[item.height, item.width]])


# Modality -> further argument -> its array for an item.
_COMPANIONS_OF: dict[str, dict[str, Callable[[ProbeInput, _Shape], Tensor]]] = {
    "image": {
        "image_grid_thw": _grid_thw,
        "image_grid_hw": _grid_hw,
        "image_sizes": lambda p, s: _grid_hw(p, s) * p.vision.patch,
        "image_position_ids": _patch_positions,
        "image_merge_sizes": lambda p, s: torch.tensor([p.vision.merge]),
        "pixel_attention_mask": _pixel_attention_mask,
        "pixel_mask": lambda p, s: _mask(s.height * p.vision.patch, s.width * p.vision.patch),
        "spatial_shapes": _grid_hw,
        "target_sizes": _grid_hw,
        "images_per_sample": lambda p, s: torch.tensor([1]),
        "batch_num_images": lambda p, s: torch.tensor([1]),
        "high_res_pixel_values": _high_resolution,
    },
    "video": {
        "video_grid_thw": _grid_thw,
        "video_position_ids": _patch_positions,
        "video_merge_sizes": lambda p, s: torch.tensor([p.vision.merge]),
        "num_frames_per_video": lambda p, s: torch.tensor([s.frames]),
        "target_sizes_videos": _grid_hw,
        "second_per_grid_ts": lambda p, s: torch.ones(1),
        "video_second_per_grid": lambda p, s: torch.ones(1),
    },
    "audio": {
        "feature_attention_mask": _frame_mask,
        "input_features_mask": _frame_mask,
        "input_values_mask": _frame_mask,
        "padding_mask": _frame_mask,
    },
}
_COMPANIONS = {name: make for table in _COMPANIONS_OF.values() for name, make in table.items()}
