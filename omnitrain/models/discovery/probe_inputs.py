"""Make tiny valid inputs of a feature method from the names of its arguments and the config.

This module knows no model. The name of an argument defines its content (``image_grid_thw``: patches in time, height,
width). The layout of the media array is one of a few conventions; we try them in order until the model accepts one.
"""

from __future__ import annotations

import inspect
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
    """Makes inputs for the feature method of a modality.

    Attributes:
        modality: ``image``, ``video`` or ``audio``.
        main: name of the argument that holds pixels, spectrograms or waveforms.
        names: names of all arguments to make.
        layout: layout of the main argument, a key of the tables below.
        vision: sizes of images and videos.
        audio: sizes of sound.
        pinpoints: tile grids that the config allows, ``(height, width)`` in pixels.
        variable: items differ in size (False: only in content).
        full_length: clips have the fixed length that the tower takes.
        grid_frames: frames of a video in units of temporal patches.
        high_resolution: sizes of a second tower for the same images.
    """

    modality: str
    main: str
    names: tuple[str, ...]
    layout: str
    vision: VisionSizes
    audio: AudioSizes
    pinpoints: tuple[tuple[int, int], ...] = ()
    variable: bool = True
    full_length: bool = False
    grid_frames: int = 1
    high_resolution: VisionSizes | None = None

    def make(self, items: Sequence[int]) -> dict[str, Tensor]:
        """Return the arguments for these items in one call; content depends only on an item's index (fp32, CPU)."""
        shapes = [self._shape(index) for index in items]
        media = {self.main: _LAYOUTS[self.modality][self.layout](self, shapes)}
        return media | {name: _COMPANIONS[name](self, shapes) for name in self.names if name != self.main}

    def _shape(self, index: int) -> _Shape:
        generator = torch.Generator().manual_seed(1000 + index)
        unit = self.vision.unit
        larger = index % 2 if self.variable else 0
        if self.modality == "audio":
            full = self.audio.full_frames
            chunk = self.audio.chunk
            short = chunk * -(-_SHORT_CLIP // chunk)
            length = full if self.full_length and full else short * (1 + larger)
            return _Shape(generator, length, 0, 0)
        frames = self.grid_frames * self.vision.temporal if self.modality == "video" else 1
        if self.layout in _FIXED_SIDE:
            patches = max(1, self.vision.side // self.vision.patch)
            return _Shape(generator, frames, patches, patches // (1 + larger) if self.variable else patches)
        return _Shape(generator, frames, 2 * unit, 2 * unit * (1 + larger))


@dataclass(frozen=True)
class _Shape:
    """One item: frames (of a video or of a spectrogram), patches along height and width."""

    generator: torch.Generator = field(repr=False)
    frames: int
    height: int
    width: int

    def random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator) * 2 - 1


def candidates(config: PreTrainedConfig, modality: str, main: str, accepted: Sequence[str]) -> Iterator[ProbeInput]:
    """Yield ways to make inputs of a feature method, the likeliest first.

    Args:
        config: config of the model.
        modality: ``image``, ``video`` or ``audio``.
        main: name of the argument that holds pixels, spectrograms or waveforms.
        accepted: names of the arguments that the model's forward takes.
    """
    known = _COMPANION_NAMES[modality]
    companions = tuple(name for name in accepted if name in known)
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


# Layouts of the main argument -----------------------------------------------------------------------------------------


def _flat_patches(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    size = probe.vision
    return _patches(probe, shapes, size.channels * size.temporal * size.patch**2)


def _square_patches(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    return _patches(probe, shapes, probe.vision.channels, probe.vision.patch, probe.vision.patch)


def _cubes(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    size = probe.vision
    return _patches(probe, shapes, size.channels, size.temporal, size.patch, size.patch)


def _patches(probe: ProbeInput, shapes: list[_Shape], *of_patch: int) -> Tensor:
    """All patches of all items; a patch has shape ``of_patch``."""
    return torch.cat([s.random(_grid_frames(probe, s) * s.height * s.width, *of_patch) for s in shapes])


def _padded_patches(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    width = probe.vision.channels * probe.vision.patch**2
    longest = max(s.height * s.width for s in shapes)
    rows = [_padded(s.random(s.height * s.width, width), (longest, width)) for s in shapes for _ in range(s.frames)]
    return torch.stack(rows)


def _strip(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    size = probe.vision
    strips = [s.random(size.channels, size.patch, size.patch * s.height * s.width) for s in shapes]
    return torch.cat(strips, dim=-1)[None]


def _images(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    patch = probe.vision.patch
    height, width = max(s.height for s in shapes) * patch, max(s.width for s in shapes) * patch
    images = [s.random(probe.vision.channels, s.height * patch, s.width * patch) for s in shapes]
    return torch.stack([_padded(image, (probe.vision.channels, height, width)) for image in images])


def _tiles(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    side = probe.vision.side
    count = 1 + max(((height // side) * (width // side) for height, width in probe.pinpoints), default=0)
    return torch.stack([s.random(count * s.frames, probe.vision.channels, side, side) for s in shapes])


def _clips(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    side = probe.vision.side
    return torch.stack([s.random(s.frames, probe.vision.channels, side, side) for s in shapes])


def _channel_clips(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    return _clips(probe, shapes).transpose(1, 2).contiguous()


def _bins_by_frames(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    longest = max(s.frames for s in shapes)
    return torch.stack([_padded(s.random(probe.audio.bins, s.frames), (probe.audio.bins, longest)) for s in shapes])


def _frames_by_bins(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    longest = max(s.frames for s in shapes)
    return torch.stack([_padded(s.random(s.frames, probe.audio.bins), (longest, probe.audio.bins)) for s in shapes])


def _waves(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    longest = max(s.frames for s in shapes) * _SAMPLES_PER_FRAME
    return torch.stack([_padded(s.random(s.frames * _SAMPLES_PER_FRAME), (longest,)) for s in shapes])


def _channel_waves(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    return _waves(probe, shapes)[:, None]


def _padded(array: Tensor, shape: Sequence[int]) -> Tensor:
    padded = array.new_zeros(*shape)
    padded[tuple(slice(0, size) for size in array.shape)] = array
    return padded


_Layout = Callable[[ProbeInput, list[_Shape]], Tensor]
_SAMPLES_PER_FRAME = 160
_SHORT_CLIP = 96
"""Frames of a spectrogram of about a second."""
_VISION: dict[str, _Layout] = {
    "flat patches": _flat_patches,
    "square patches": _square_patches,
    "cubes": _cubes,
    "padded patches": _padded_patches,
    "strip": _strip,
    "images": _images,
    "tiles": _tiles,
    "clips": _clips,
    "channel clips": _channel_clips,
}
_AUDIO: dict[str, _Layout] = {
    "bins, frames": _bins_by_frames,
    "frames, bins": _frames_by_bins,
    "waves": _waves,
    "channel waves": _channel_waves,
}
_LAYOUTS = {"image": _VISION, "video": _VISION, "audio": _AUDIO}
_FIXED_SIDE = ("images", "tiles", "clips", "channel clips")


# Further arguments ----------------------------------------------------------------------------------------------------


def _grid_frames(probe: ProbeInput, shape: _Shape) -> int:
    return max(1, shape.frames // probe.vision.temporal)


def _grid_thw(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    return torch.tensor([[_grid_frames(probe, s), s.height, s.width] for s in shapes])


def _grid_hw(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    return torch.tensor([[s.height, s.width] for s in shapes])


def _pixels(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    return _grid_hw(probe, shapes) * probe.vision.patch


def _pixel_mask(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    patch = probe.vision.patch
    height, width = max(s.height for s in shapes) * patch, max(s.width for s in shapes) * patch
    valid = [torch.ones(s.height * patch, s.width * patch, dtype=torch.bool) for s in shapes]
    return torch.stack([_padded(mask, (height, width)) for mask in valid])


def _pixel_attention_mask(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    if probe.layout == "padded patches":
        longest = max(s.height * s.width for s in shapes)
        return torch.tensor([[i < s.height * s.width for i in range(longest)] for s in shapes])
    mask = _pixel_mask(probe, shapes)
    return mask[:, None] if probe.layout == "tiles" else mask


def _high_resolution(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    side = (probe.high_resolution or probe.vision).side
    return torch.stack([s.random(probe.vision.channels, side, side) for s in shapes])


def _patch_positions(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    longest = max(s.height * s.width for s in shapes)
    positions = []
    for s in shapes:
        columns, rows = torch.meshgrid(torch.arange(s.width), torch.arange(s.height), indexing="xy")
        padded = torch.full((longest, 2), -1)
        padded[: s.height * s.width] = torch.stack([columns.flatten(), rows.flatten()], -1)
        positions += [padded] * s.frames
    return torch.stack(positions)


def _frames_per_item(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    return torch.tensor([s.frames for s in shapes])


def _ones(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    return torch.ones(len(shapes), dtype=torch.long)


def _merge_sizes(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    return torch.full((len(shapes),), probe.vision.merge)


def _seconds(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    return torch.ones(len(shapes))


def _frame_mask(probe: ProbeInput, shapes: list[_Shape]) -> Tensor:
    scale = _SAMPLES_PER_FRAME if probe.layout in ("waves", "channel waves") else 1
    longest = max(s.frames for s in shapes)
    return torch.tensor([[i < s.frames for i in range(longest)] for s in shapes]).repeat_interleave(scale, dim=1)


_Companion = Callable[[ProbeInput, list[_Shape]], Tensor]
_COMPANIONS_OF: dict[str, dict[str, _Companion]] = {
    "image": {
        "image_grid_thw": _grid_thw,
        "image_grid_hw": _grid_hw,
        "image_sizes": _pixels,
        "image_position_ids": _patch_positions,
        "image_merge_sizes": _merge_sizes,
        "pixel_attention_mask": _pixel_attention_mask,
        "pixel_mask": _pixel_mask,
        "spatial_shapes": _grid_hw,
        "target_sizes": _grid_hw,
        "images_per_sample": _ones,
        "batch_num_images": _ones,
        "high_res_pixel_values": _high_resolution,
    },
    "video": {
        "video_grid_thw": _grid_thw,
        "video_position_ids": _patch_positions,
        "video_merge_sizes": _merge_sizes,
        "num_frames_per_video": _frames_per_item,
        "target_sizes_videos": _grid_hw,
        "second_per_grid_ts": _seconds,
        "video_second_per_grid": _seconds,
    },
    "audio": {
        "feature_attention_mask": _frame_mask,
        "input_features_mask": _frame_mask,
        "input_values_mask": _frame_mask,
        "padding_mask": _frame_mask,
    },
}
_COMPANION_NAMES = {modality: tuple(table) for modality, table in _COMPANIONS_OF.items()}
_COMPANIONS = {name: make for table in _COMPANIONS_OF.values() for name, make in table.items()}
