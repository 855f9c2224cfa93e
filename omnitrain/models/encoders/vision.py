"""Encode images and videos by any HF vision tower."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

from omnitrain.data.packing.sample import Features
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import ComponentAdapter, EncoderMixin, TensorFeatures, one_item
from omnitrain.models.encoders.towers import (
    FeatureProjector,
    JoinedTowers,
    ProjectorSettings,
    merge_grid,
    patch_grid,
    takes_grid,
    tower_from_config,
)
from omnitrain.models.hf.load import as_config
from omnitrain.recipe.component_configs import JoinedTowersConfig, VisionEncoderConfig
from omnitrain.transformers_private import ContainerModel

PIXELS = "pixel_values"
STILL = -1  # frame index of a still image


class VisionAdapter(ComponentAdapter):
    """Convert images and video frames to pixels by the HF image processor (Pillow backend, without torchvision)."""

    modalities = ("image", "video")

    def __init__(self, config: VisionEncoderConfig) -> None:
        """Build the image processor of ``config``."""
        self.max_frames, self.fps = config.max_frames, config.fps
        self.processor = image_processor(dict(config.processor or {}))
        self.more = [image_processor(dict(one)) for one in config.more_processors or ()]
        self.tower, *self.more_towers = _tower_configs(as_config(config.tower or {}))
        self.merge = ProjectorSettings(**(config.projector or {})).merge

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """Return pixels of an image or frames, and their tokens; ValueError: the patches cannot be joined in blocks."""
        frames = media if modality == "video" else [media]
        index = np.arange(len(frames)) if modality == "video" else np.array([STILL])
        output = self.processor(images=frames, return_tensors="np")
        features = {PIXELS: output[PIXELS], "frame_index": index.astype(np.int64)}
        if "image_grid_thw" in output:
            features["image_grid_thw"] = output["image_grid_thw"].astype(np.int64)
            merged = int(output["image_grid_thw"].prod(axis=1).sum()) // self.tower.spatial_merge_size**2
            return features, merged
        height, width = _patches(output[PIXELS], self.tower)
        names = pixel_names(len(self.more))
        for name, tower, processor in zip(names[1:], self.more_towers, self.more, strict=True):
            pixels = processor(images=frames, return_tensors="np")[PIXELS]
            if (found := _patches(pixels, tower)) != (height, width):
                raise UserError(
                    f"`more_towers`: {tower.model_type} gives {found[0]} x {found[1]} patches, and "
                    f"{self.tower.model_type} {height} x {width}; only as many can be joined: use towers whose image "
                    "size / patch size are equal, or two encoders, whose features stand one after the other"
                )
            features[name] = pixels
        if height % self.merge or width % self.merge:
            raise ValueError(
                f"{height} x {width} patches cannot be joined in blocks of {self.merge} x {self.merge}; change the "
                "image size or projector.factor"
            )
        return features, len(frames) * (height // self.merge) * (width // self.merge)


def pixel_names(num_more: int) -> list[str]:
    """Return the names of the pixels of a tower and of ``num_more`` that are joined with it."""
    return [PIXELS, *(f"{PIXELS}_{number}" for number in range(1, num_more + 1))]


def _tower_configs(tower: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return the configs of joined towers, or of the only one."""
    return [as_config(one) for one in tower.towers or ()] if isinstance(tower, JoinedTowersConfig) else [tower]


def _patches(pixels: np.ndarray, tower: PreTrainedConfig) -> tuple[int, int]:
    height, width = (side // tower.patch_size for side in pixels.shape[-2:])
    return height, width


def image_processor(settings: dict[str, Any]) -> Any:
    """Build the HF image processor, with its Pillow backend if it has one; raise UserError if it is unknown."""
    name = settings.pop("image_processor_type")
    base = name.removesuffix("Fast").removesuffix("Pil")
    for candidate in (f"{base}Pil", base):
        processor_class = get_image_processor_class_from_name(candidate)
        if processor_class is not None:
            return processor_class(**settings)
    raise UserError(f"transformers has no image processor {name!r}")


class VisionEncoder(ContainerModel, EncoderMixin):
    """A tower of fixed images (SigLIP, CLIP, ViT) or patches with ``grid_thw`` (Qwen-VL), frame times, a projector."""

    config_class = VisionEncoderConfig
    main_input_name = "pixel_values"

    def __init__(self, config: VisionEncoderConfig, tower: PreTrainedModel | None = None) -> None:
        """``tower``: with weights; None: random ones. UserError: both it and the projector would merge patches."""
        super().__init__(config)
        self.tower = tower if tower is not None else tower_from_config(as_config(config.tower or {}), "image")
        self.takes_grid = takes_grid(self.tower)
        settings = ProjectorSettings(**(config.projector or {}))
        if self.takes_grid and settings.kind == "pixel_shuffle":
            raise UserError(f"{type(self.tower).__name__} merges patches itself; use projector.kind: linear or mlp")
        tower_config = self.tower.config
        tower_size = getattr(tower_config, "out_hidden_size", None) if self.takes_grid else tower_config.hidden_size
        self.projector = FeatureProjector(settings, 2, tower_size or tower_config.hidden_size, config.hidden_size)
        self.time_projector = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.post_init()

    def adapter(self) -> VisionAdapter:
        """Return the converter from images and videos to pixels, for data workers."""
        return VisionAdapter(self.config)

    def lm_encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """Encode images and frames in one call: ``num_tokens`` features per item, ``[sum(num_tokens), hidden]``.

        ``features``: ``pixel_values`` ``[frames, channels, height, width]`` fp32, or for towers with ``grid_thw``
        ``[patches, channels * patch_volume]`` with ``image_grid_thw`` ``[frames, 3]`` int64; ``pixel_values_1``, ... of
        the other joined towers; ``frame_index`` ``[frames]`` int64, -1 for still images.
        Raises ValueError: the tower gives another number of features; UserError:
        the tower has side outputs (deepstack), which the foundation cannot take.
        """
        encoded, tokens_per_frame = self._encoded(features, num_tokens)
        return self.projector(encoded) + self._time(features["frame_index"]).repeat_interleave(
            tokens_per_frame, dim=0, output_size=encoded.size(0)
        )

    def lm_tower(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> TensorFeatures:
        """First part of :meth:`lm_encode`: ``main``, the joined patches of the tower, and ``frame_index`` of each."""
        encoded, tokens_per_frame = self._encoded(features, num_tokens)
        index = features["frame_index"].repeat_interleave(tokens_per_frame, output_size=encoded.size(0))
        return {"main": encoded, "frame_index": index}

    def lm_project(self, rows: TensorFeatures) -> torch.Tensor:
        """Second part of :meth:`lm_encode`."""
        return self.projector(rows["main"]) + self._time(rows["frame_index"])

    def minimal_rows(self) -> TensorFeatures:
        """Return a row of zeros, of a still image."""
        return {"main": torch.zeros(1, self.projector.width), "frame_index": torch.full((1,), STILL)}

    def _encoded(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """``[n, width]``, the joined patches of all frames; and ``[frames]``, the number of them of each frame."""
        if self.takes_grid:
            grid = features["image_grid_thw"]
            output = self.tower(features[PIXELS].to(self.tower.dtype), grid_thw=grid)
            _refuse_side_outputs(self.tower, output)
            encoded = output.last_hidden_state if output.pooler_output is None else output.pooler_output
            tokens_per_frame = grid.prod(dim=1) // self.tower.config.spatial_merge_size**2
        else:
            if isinstance(self.tower, JoinedTowers):
                grid = self.tower([features[name] for name in pixel_names(len(self.tower.towers) - 1)])
            else:
                grid = patch_grid(self.tower, features[PIXELS])
            merged = merge_grid(grid, self.projector.factor)
            encoded = merged.flatten(0, 1)
            tokens_per_frame = torch.full_like(features["frame_index"], merged.size(1))
        if encoded.size(0) != sum(num_tokens):
            kind = type(self.tower).__name__
            raise ValueError(f"{kind} gave {encoded.size(0)} features for {sum(num_tokens)} placeholders")
        return encoded, tokens_per_frame

    def _time(self, frame_index: torch.Tensor) -> torch.Tensor:
        """``[frames] -> [frames, hidden]``: projected sinusoids of the frame index, zero for still images."""
        half = self.config.hidden_size // 2
        scale = torch.arange(half, device=frame_index.device, dtype=torch.float32) * (-math.log(1e4) / half)
        angles = frame_index[:, None].clamp(min=0) * scale.exp()
        waves = nn.functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, self.config.hidden_size % 2))
        is_frame = (frame_index != STILL)[:, None]
        return self.time_projector((waves * is_frame).to(self.time_projector.weight.dtype))

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """Return the pixels of a black image."""
        return one_item(self.adapter(), "image", Image.new("RGB", (1, 1)))


def _refuse_side_outputs(tower: PreTrainedModel, output: Any) -> None:
    if getattr(output, "deepstack_features", None):
        raise UserError(
            f"{type(tower).__name__} gives extra features for several layers of its own language model (deepstack), "
            "and this foundation cannot take them; set `deepstack_visual_indexes: []` in the tower's config"
        )
