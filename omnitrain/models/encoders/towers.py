"""Find the tower in an HF model (itself, or the encoder of CLIP, Whisper, ...), and project its features."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.hf.load import Source, as_config, as_dict, model_class, resolve
from omnitrain.models.hf.stored_tensor import read_weights, weights_left_in_files
from omnitrain.recipe.component_configs import JoinedTowersConfig
from omnitrain.transformers_private import ContainerModel

WAVEFORM = "input_values"  # the argument of towers that read samples of sound


def tower_from_source(source: Source, modality: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load the tower of a model (see :func:`resolve`), and no other weights; raise UserError if it has none."""
    with weights_left_in_files():
        model = resolve(source, dtype=dtype, part_of=_without_draws)
        tower = _tower_of(_rebuilt(model) if source is model else model, modality)
    read_weights(tower)
    return tower


def tower_from_config(config: PreTrainedConfig, modality: str) -> PreTrainedModel:
    """Build a tower with random weights."""
    return _tower_of(model_class(config)(_without_draws(config)), modality)


def reads_waveforms(kind: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Whether a tower reads samples of sound, and no spectrogram."""
    return kind.main_input_name == WAVEFORM and not hasattr(config, "num_mel_bins")


def _without_draws(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config without dropout, layer drop and SpecAugment of a waveform tower: their draws depend on the layout."""
    if not reads_waveforms(model_class(config), config):
        return config
    shares = {key for key, value in vars(config).items() if isinstance(value, float) and value}
    draws = {key for key in shares if "drop" in key or (key.startswith("mask_") and key.endswith("_prob"))}
    if draws:
        config = copy.deepcopy(config)
        config.update(dict.fromkeys(draws, 0.0))
    return config


def _rebuilt(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, if it draws nothing; else one without draws, of the same tensors."""
    config = _without_draws(model.config)
    if config is model.config:
        return model
    made = type(model)(config).to(model.device)
    weights = model.state_dict()
    made.load_state_dict({name: weights[name] for name in made.state_dict()}, assign=True)  # not one of SpecAugment
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    return made


def _tower_of(model: PreTrainedModel, modality: str) -> PreTrainedModel:
    is_whole = model.config.is_encoder_decoder or bool(model.config.sub_configs)
    if not is_whole:
        return model
    tower = model.get_encoder() if model.config.is_encoder_decoder else model.get_encoder(modality)
    if tower is None or tower is model:
        raise UserError(f"{type(model).__name__} has no {modality} encoder: its `get_encoder` returns none")
    return tower


class JoinedTowers(ContainerModel):
    """Towers that read the same images, each as pixels of its own, and whose features of a patch are joined."""

    config: JoinedTowersConfig
    config_class = JoinedTowersConfig

    def __init__(self, config: JoinedTowersConfig, towers: Sequence[PreTrainedModel] = ()) -> None:
        """``towers``: with weights; none: towers with random weights."""
        super().__init__(config)
        self.towers = nn.ModuleList(
            towers or [tower_from_config(as_config(one), "image") for one in config.towers or ()]
        )
        self.post_init()

    @classmethod
    def of(cls, place: str, towers: Sequence[PreTrainedModel]) -> JoinedTowers:
        """Join towers with weights; ``place``: the encoder's key. UserError: one reads no images of one size."""
        for number, tower in enumerate(towers):
            if takes_grid(tower) or not hasattr(tower.config, "patch_size"):
                raise UserError(
                    f"{place}.{f'more_towers.{number - 1}' if number else 'tower'}: {type(tower).__name__} reads no "
                    "images of one size; expected a tower such as SigLIP, CLIP or DINOv2, whose features can be joined"
                )
        sizes = [tower.config.hidden_size for tower in towers]
        return cls(JoinedTowersConfig(towers=[as_dict(one.config) for one in towers], hidden_size=sum(sizes)), towers)

    def forward(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return ``[N, rows, columns, hidden_size]`` of the pixels of each tower, ``[N, channels, height, width]``."""
        return torch.cat([patch_grid(*pair) for pair in zip(self.towers, pixels, strict=True)], dim=-1)


AutoModel.register(JoinedTowersConfig, JoinedTowers)


def takes_grid(tower: PreTrainedModel) -> bool:
    """Whether a tower reads patches of images of any size, with ``grid_thw`` (Qwen-VL)."""
    return "grid_thw" in inspect.signature(tower.forward).parameters


def patch_grid(tower: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Run a tower of images of one size: ``[N, channels, height, width] -> [N, rows, columns, width]``."""
    height, width = (side // tower.config.patch_size for side in pixels.shape[-2:])
    dtype = next((one.dtype for one in tower.parameters() if one.is_floating_point()), pixels.dtype)
    patches: torch.Tensor = tower(pixel_values=pixels.to(dtype)).last_hidden_state
    return patches[:, patches.size(1) - height * width :].unflatten(1, (height, width))  # after class and other tokens


class ProjectorSettings(NamedTuple):
    """The kind of a projector."""

    kind: str  # ``linear``, ``mlp`` or ``pixel_shuffle``
    factor: int  # neighbours along a dim that ``pixel_shuffle`` joins

    @property
    def merge(self) -> int:
        """Neighbours along a dim that become one feature."""
        return self.factor if self.kind == "pixel_shuffle" else 1


class FeatureProjector(nn.Module):
    """A ``linear``, ``mlp`` or ``pixel_shuffle`` projector (Chen et al. 2024), of inputs ``[..., width]``."""

    def __init__(self, settings: ProjectorSettings, dims: int, tower_size: int, hidden_size: int) -> None:
        """``dims``: number of dims along which neighbours are joined, 2 for images, 1 for sound."""
        super().__init__()
        self.factor = settings.merge
        self.width = tower_size * settings.merge**dims
        layers: list[nn.Module] = [nn.Linear(self.width, hidden_size)]
        if settings.kind != "linear":
            layers = [nn.LayerNorm(self.width), *layers, nn.GELU(), nn.Linear(hidden_size, hidden_size)]
        self.layers = nn.Sequential(*layers)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Project ``[..., width] -> [..., hidden]``. A tower on other ranks may have computed in another dtype."""
        return self.layers(features.to(next(self.parameters()).dtype))


def merge_grid(patches: torch.Tensor, factor: int) -> torch.Tensor:
    """Join each ``factor`` x ``factor`` block: ``[N, H, W, D] -> [N, H/f * W/f, f*f*D]``, row-major."""
    n, height, width, dim = patches.shape
    blocks = patches.unflatten(2, (width // factor, factor)).unflatten(1, (height // factor, factor))
    return blocks.transpose(2, 3).reshape(n, (height // factor) * (width // factor), factor * factor * dim)


def merge_frames(frames: torch.Tensor, factor: int) -> torch.Tensor:
    """Join ``factor`` neighbours, padded with zeros at the end: ``[N, P, D] -> [N, ceil(P/f), f*D]``."""
    missing: Any = -frames.size(1) % factor
    return nn.functional.pad(frames, (0, 0, 0, missing)).unflatten(1, (-1, factor)).flatten(2)
