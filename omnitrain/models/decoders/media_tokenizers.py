"""Convert media to discrete codes and back by frozen media tokenizers.

Images: any HF VQ model with ``encode`` (and ``decode``, to generate): Janus, Emu3, Chameleon. Sound: omnitrain's
mel-VQ, or a HF residual codec (EnCodec, DAC, Mimi), whose codebooks are flattened in time order. Any other model must
implement :class:`MediaTokenizer` itself.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import PreTrainedModel

from omnitrain.data.packing.sample import Features, Grid
from omnitrain.data.sources.media import Waveform
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import ComponentAdapter, TensorFeatures, one_item
from omnitrain.models.decoders.mel_vq import MelVQ, log_mel
from omnitrain.recipe.component_configs import MelVQConfig


@runtime_checkable
class MediaTokenizer(Protocol):
    """A model that converts items of one modality to codes and back."""

    modality: str  # ``image`` or ``audio``
    num_codes: int  # size of the vocabulary

    def length(self, codes: Sequence[int]) -> int | None:
        """Return the number of codes of an item that begins with ``codes``; None: items end with an extra class."""

    def adapter(self) -> ComponentAdapter:
        """Return the converter from media to input features; it has no weights, for data workers."""

    def encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """Return codes of items end to end, ``[n]`` int64, without the end tokens that ``num_tokens`` counts."""

    def decode(self, codes: torch.Tensor) -> Any:
        """Return the ``PIL.Image`` or ``Waveform`` of one item's codes ``[n]``."""

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """Return the smallest valid input features, and the number of tokens of each item."""


def media_tokenizer(
    model: PreTrainedModel, image_size: int | None, num_codebooks: int, image_sizes: Sequence[str] = ()
) -> MediaTokenizer:
    """Return the :class:`MediaTokenizer` for ``model``; UserError: it is none, or a setting is missing."""
    if isinstance(model, MediaTokenizer):
        return model
    if isinstance(model, MelVQ):
        return _MelTokenizer(model)
    if not hasattr(model, "encode"):
        raise UserError(
            f"{type(model).__name__} is no media tokenizer: it has no `encode`. If the tokenizer is part of a larger "
            "model (such as JanusModel's `vqmodel`), save it alone with save_pretrained and name that folder"
        )
    if "pixel_values" in inspect.signature(model.encode).parameters:
        _require_settings(model, ("channel_multiplier",), ("num_embeddings", "codebook_size"))
        return _SizedVQTokenizer(model, image_sizes) if image_sizes else _ImageVQTokenizer(model, image_size)
    _require_settings(model, ("codebook_size",), ("sampling_rate",), ("hop_length", "frame_rate"))
    return _CodecTokenizer(model, num_codebooks)


def settings_of(codec: MediaTokenizer) -> set[str]:
    """Return the keys of a recipe's decoder that a media tokenizer uses."""
    if isinstance(codec, _ImageVQTokenizer | _SizedVQTokenizer):
        return {"image_size", "image_sizes", "num_frames", "fps"}
    ends = {"max_tokens"} if codec.length(()) is None else {"num_frames", "fps"}
    return ends | ({"num_codebooks"} if isinstance(codec, _CodecTokenizer) else set())


def _require_settings(model: PreTrainedModel, *settings: tuple[str, ...]) -> None:
    """Raise unless the config has one name of each tuple, as the configs of transformers' tokenizers have."""
    missing = [" or ".join(names) for names in settings if not any(hasattr(model.config, name) for name in names)]
    if missing:
        raise UserError(
            f"{type(model).__name__} is no media tokenizer that omnitrain knows: its config has no "
            f"{', no '.join(missing)}; a tokenizer class of yours must have the attributes and methods of "
            f"{MediaTokenizer.__module__}.{MediaTokenizer.__name__}"
        )


class ImageTargetAdapter(ComponentAdapter):
    """Convert images to ``pixel_values`` ``[1, channels, size, size]`` in [-1, 1]."""

    modalities = ("image",)

    def __init__(self, size: int, num_tokens: int) -> None:
        """``size``: side, pixels."""
        self.size, self.num_tokens = size, num_tokens

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """Return the features of an image of any size, and its number of tokens."""
        image = media.convert("RGB")
        if image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), Image.Resampling.BICUBIC)
        return {"pixel_values": pixels_of(image)[None]}, self.num_tokens

    def grid(self, features: Features) -> Grid:
        """Return where its tokens stand."""
        side = math.isqrt(self.num_tokens)
        return Grid(0, 1, side, side)


def pixels_of(image: Image.Image) -> np.ndarray:
    """Return the values of an RGB image, float32 ``[3, height, width]`` in [-1, 1]."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1)


class _SizedTargetAdapter(ComponentAdapter):
    """Cuts an image to the size of the nearest shape and area: ``pixel_values`` ``[3 * height * width]``, ``size``."""

    modalities = ("image",)

    def __init__(self, sizes: Sequence[tuple[int, int]], grids: Sequence[Grid]) -> None:
        self.sizes, self.grids = sizes, grids

    def grid(self, features: Features) -> Grid:
        return self.grids[int(features["size"][0])]

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        image = media.convert("RGB")
        which = min(range(len(self.sizes)), key=lambda place: _difference(image.size, self.sizes[place]))
        fitted = ImageOps.fit(image, self.sizes[which], Image.Resampling.BICUBIC)
        return {"pixel_values": pixels_of(fitted).reshape(-1), "size": np.array([which])}, _length(self.grids[which])


def _length(grid: Grid) -> int:
    return grid.before + math.prod(grid[1:])


def _difference(size: tuple[int, int], other: tuple[int, int]) -> tuple[float, float]:
    width, height = (math.log(have / want) for have, want in zip(size, other, strict=True))
    return abs(width - height), abs(width + height)


def _stride(model: PreTrainedModel) -> int:
    """Return the pixels of a code along a side."""
    return int(2 ** (len(model.config.channel_multiplier) - 1))


def _encoded(model: PreTrainedModel, pixels: torch.Tensor) -> torch.Tensor:
    """Encode images ``[n, 3, height, width]`` -> codes ``[n * rows * columns]``, row by row."""
    pixels = pixels.to(model.dtype)
    takes_sizes = "image_sizes" in inspect.signature(model.encode).parameters
    sizes = {"image_sizes": torch.tensor([pixels.shape[-2:]] * len(pixels))} if takes_sizes else {}
    tokens = model.encode(pixels, **sizes).image_tokens
    return torch.cat([t.flatten() for t in tokens]) if isinstance(tokens, list) else tokens.flatten()


def _takes_rows(model: PreTrainedModel) -> bool:
    """Whether the model decodes codes in rows and columns, and so any shape; UserError: it has no decoder."""
    if not hasattr(model, "decode"):
        raise UserError(
            f"{type(model).__name__} has no `decode`: it can be trained with, but to generate images use the VQ model "
            "of Janus or Emu3"
        )
    return "image_tokens" not in inspect.signature(model.decode).parameters


def _decoded(model: PreTrainedModel, codes: torch.Tensor) -> Image.Image:
    """Decode codes ``[rows, columns]`` to an RGB image."""
    codes = codes[None] if _takes_rows(model) else codes.view(1, -1)
    return image_of(model.decode(codes)[0])


def image_of(pixels: torch.Tensor) -> Image.Image:
    """Return the RGB image of values ``[3, height, width]``, which are cut to [-1, 1]."""
    values = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return Image.fromarray(values.permute(1, 2, 0).cpu().numpy())


class _ImageVQTokenizer:
    """An HF VQ model for square images of one size."""

    modality = "image"

    def __init__(self, model: PreTrainedModel, image_size: int | None) -> None:
        """Check ``image_size``, pixels; UserError: missing, no multiple of the stride, or not the model's only size."""
        self.model, stride = model, _stride(model)
        rows = getattr(model.config, "num_patches", None)  # of a model that decodes one size alone
        image_size = image_size or (rows and rows * stride)
        if image_size is None or image_size % stride:
            raise UserError(
                f"an image decoder needs image_size, a multiple of {stride} for this tokenizer; found {image_size}"
            )
        if rows and image_size != rows * stride:
            raise UserError(
                f"image_size: found {image_size}, but {type(model).__name__} decodes images of {rows * stride} pixels "
                "alone; use this size, or leave it out"
            )
        self.image_size, self.side = image_size, image_size // stride
        self.num_codes = _num_codes(model)

    def length(self, codes: Sequence[int]) -> int:
        return int(self.side**2)

    def grid(self, codes: Sequence[int]) -> Grid:
        return Grid(0, 1, self.side, self.side)

    def adapter(self) -> ImageTargetAdapter:
        return ImageTargetAdapter(self.image_size, self.side**2)

    def encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """Encode ``pixel_values`` ``[n, 3, size, size]`` -> ``[n * side * side]`` codes, row-major."""
        return _encoded(self.model, features["pixel_values"])

    def decode(self, codes: torch.Tensor) -> Image.Image:
        """Decode ``[side * side]`` codes to an RGB image; UserError: the tokenizer has no decoder (Chameleon's)."""
        return _decoded(self.model, codes.view(self.side, self.side))

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        return one_item(self.adapter(), "image", Image.new("RGB", (1, 1)))


def _num_codes(model: PreTrainedModel) -> int:
    return int(getattr(model.config, "num_embeddings", None) or model.config.codebook_size)


class _SizedVQTokenizer:
    """An HF VQ model for images of several sizes. An item begins with a code of its size; these follow the model's."""

    modality = "image"

    def __init__(self, model: PreTrainedModel, sizes: Sequence[str]) -> None:
        """``sizes``: ``WIDTHxHEIGHT`` in pixels.

        Raises UserError: a side is no multiple of the model's stride, or the model decodes one shape alone.
        """
        self.model, self.stride, self.names = model, _stride(model), tuple(sizes)
        self.sizes = [(int(width), int(height)) for width, height in (size.split("x") for size in sizes)]
        if wrong := [f"{w}x{h}" for w, h in self.sizes if w % self.stride or h % self.stride or not w * h]:
            raise UserError(
                f"image_sizes: found {', '.join(wrong)}; expected sides that are multiples of {self.stride} for this "
                "tokenizer"
            )
        if not _takes_rows(model):
            raise UserError(
                f"image_sizes: {type(model).__name__} decodes images of one shape alone; use `image_size`, or the VQ "
                "model of Emu3"
            )
        self.first_size = _num_codes(model)
        self.num_codes = self.first_size + len(self.sizes)
        self.grids = [Grid(1, 1, height // self.stride, width // self.stride) for width, height in self.sizes]

    def grid(self, codes: Sequence[int]) -> Grid | None:
        return self.grids[codes[0] - self.first_size] if codes else None

    def length(self, codes: Sequence[int]) -> int:
        grid = self.grid(codes)
        return 1 if grid is None else _length(grid)

    def next_codes(self, codes: Sequence[int], size: str | None) -> range:
        """See :meth:`DecoderMixin.next_classes`."""
        if size is not None and size not in self.names:
            raise UserError(f"size {size!r}: the model writes images of {', '.join(self.names)}; use one of them")
        if codes:
            return range(self.first_size)
        if size is None:
            return range(self.first_size, self.num_codes)
        place = self.first_size + self.names.index(size)
        return range(place, place + 1)

    def adapter(self) -> _SizedTargetAdapter:
        return _SizedTargetAdapter(self.sizes, self.grids)

    def encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """Encode images, equal sizes together; an item is its size, and its codes row by row."""
        sizes = features["size"].tolist()
        images = features["pixel_values"].split([3 * math.prod(self.sizes[size]) for size in sizes])
        codes: dict[int, Iterator[torch.Tensor]] = {}
        for size, (width, height) in enumerate(self.sizes):
            if own := [image for image, of_image in zip(images, sizes, strict=True) if of_image == size]:
                pixels = torch.stack(own).view(-1, 3, height, width)
                codes[size] = iter(_encoded(self.model, pixels).split(math.prod(self.grids[size][1:])))
        items = [(features["size"][place : place + 1] + self.first_size, size) for place, size in enumerate(sizes)]
        return torch.cat([part for first, size in items for part in (first, next(codes[size]))])

    def decode(self, codes: torch.Tensor) -> Image.Image:
        """Decode the codes of an item to an RGB image."""
        width, height = self.sizes[int(codes[0]) - self.first_size]
        return _decoded(self.model, codes[1:].view(height // self.stride, width // self.stride))

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        return one_item(self.adapter(), "image", Image.new("RGB", (1, 1)))


class _MelTargetAdapter(ComponentAdapter):
    """Convert waveforms to log-mel frames, padded to whole codes."""

    modalities = ("audio",)

    def __init__(self, config: MelVQConfig) -> None:
        self.config = config

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """Return ``frames`` ``[codes * frames_per_code, mels]`` and the number of tokens: codes and the end token."""
        samples = media.resampled(self.config.sampling_rate).samples
        frames = log_mel(torch.from_numpy(samples), self.config).numpy()
        return {"frames": frames}, len(frames) // self.config.frames_per_code + 1


class _MelTokenizer:
    """Encode mel frames by the nearest vector of a codebook, and decode codes by Griffin-Lim."""

    modality = "audio"

    def __init__(self, model: MelVQ) -> None:
        self.model = model
        self.num_codes = model.config.codebook_size

    def length(self, codes: Sequence[int]) -> None:
        return None

    def adapter(self) -> _MelTargetAdapter:
        return _MelTargetAdapter(self.model.config)

    def encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """Encode ``frames`` ``[codes * frames_per_code, mels]`` -> ``[codes]``."""
        return self.model.encode(features["frames"])

    def decode(self, codes: torch.Tensor) -> Waveform:
        return Waveform(self.model.decode(codes).cpu().numpy(), self.model.config.sampling_rate)

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        silence = Waveform(np.zeros(1, dtype=np.float32), self.model.config.sampling_rate)
        return one_item(self.adapter(), "audio", silence)


class _CodecTargetAdapter(ComponentAdapter):
    """Convert waveforms to the codec's sampling rate, padded with silence to whole codec frames."""

    modalities = ("audio",)

    def __init__(self, sampling_rate: int, hop: int, num_codebooks: int) -> None:
        self.sampling_rate, self.hop, self.num_codebooks = sampling_rate, hop, num_codebooks

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """Return ``waveform`` ``[samples]`` and the number of tokens: codes and the end token."""
        samples = media.resampled(self.sampling_rate).samples
        samples = np.pad(samples, (0, -len(samples) % self.hop))
        count = len(samples) // self.hop * self.num_codebooks + 1
        return {"waveform": samples}, count


class _CodecTokenizer:
    """An HF residual codec; codebook ``q``, with ids of its own, of frame ``t`` is token ``t * num_codebooks + q``."""

    modality = "audio"

    def __init__(self, model: PreTrainedModel, num_codebooks: int) -> None:
        """``num_codebooks``: use the first ``num_codebooks`` codebooks."""
        config = model.config
        self.model, self.num_codebooks = model, num_codebooks
        self.codebook_size = config.codebook_size
        self.num_codes = self.codebook_size * num_codebooks
        self.sampling_rate = config.sampling_rate
        hop = getattr(config, "hop_length", None)
        self.hop = int(hop if hop is not None else round(config.sampling_rate / config.frame_rate))

    def length(self, codes: Sequence[int]) -> None:
        return None

    def adapter(self) -> _CodecTargetAdapter:
        return _CodecTargetAdapter(self.sampling_rate, self.hop, self.num_codebooks)

    def encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """Encode ``waveform`` ``[samples]`` -> ``[n]`` codes, clip by clip, so that none sees others' padding."""
        num_samples = [(count - 1) // self.num_codebooks * self.hop for count in num_tokens]
        clips = features["waveform"].to(self.model.dtype).split(num_samples)
        return torch.cat([self._clip_codes(clip[None, None]) for clip in clips])

    def _clip_codes(self, clip: torch.Tensor) -> torch.Tensor:
        """``[1, 1, samples] -> [frames * num_codebooks]``."""
        codes = self.model.encode(clip).audio_codes
        codes = codes.reshape(-1, *codes.shape[-2:])[0][: self.num_codebooks]
        if codes.size(0) < self.num_codebooks:
            raise UserError(
                f"{type(self.model).__name__} gives {codes.size(0)} codebooks, but num_codebooks is "
                f"{self.num_codebooks}"
            )
        offsets = torch.arange(self.num_codebooks, device=codes.device)[:, None] * self.codebook_size
        return (codes + offsets).t().flatten()

    def decode(self, codes: torch.Tensor) -> Waveform:
        """Decode ``[frames * num_codebooks]`` codes to sound; an incomplete last frame is dropped."""
        whole = codes[: codes.numel() // self.num_codebooks * self.num_codebooks]
        grid = (whole.view(-1, self.num_codebooks) % self.codebook_size).t()[None]
        if not grid.size(-1):
            return Waveform(np.zeros(0, dtype=np.float32), self.sampling_rate)
        parameters = inspect.signature(self.model.decode).parameters
        if "audio_scales" in parameters:
            audio = self.model.decode(audio_codes=grid[None], audio_scales=[None]).audio_values
        else:
            audio = self.model.decode(audio_codes=grid).audio_values
        return Waveform(audio.flatten().float().cpu().numpy(), self.sampling_rate)

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        return one_item(self.adapter(), "audio", Waveform(np.zeros(self.hop, dtype=np.float32), self.sampling_rate))
