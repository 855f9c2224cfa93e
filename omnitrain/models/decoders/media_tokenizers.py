"""Media <-> discrete codes, over the frozen tokenizers of the field.

Images: any HF VQ model with ``encode`` (and ``decode``, to generate): Janus, Emu3, Chameleon. Sound: omnitrain's
mel-VQ, or a HF residual codec (EnCodec, DAC, Mimi), whose codebooks are flattened in time order. A model of any other
make that is a :class:`MediaTokenizer` itself is taken as it is.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from omnitrain.data.media import Waveform
from omnitrain.data.sample import Features
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import ComponentAdapter, TensorFeatures, one_item
from omnitrain.models.decoders.mel_vq import MelVQ, log_mel
from omnitrain.recipe.component_configs import MelVQConfig


@runtime_checkable
class MediaTokenizer(Protocol):
    """Codes of one modality.

    Attributes:
        modality: ``image`` or ``audio``.
        num_codes: size of the vocabulary.
        fixed_length: codes of every item, or None where items differ and end with an extra class.
    """

    modality: str
    num_codes: int
    fixed_length: int | None

    def adapter(self) -> ComponentAdapter:
        """The weightless side, for data workers."""
        ...

    def encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """Codes of all items end to end, ``[n]`` int64, without ends. ``num_tokens``: of each item, with its end."""
        ...

    def decode(self, codes: torch.Tensor) -> Any:
        """The medium of one item's ``[n]`` codes: ``PIL.Image`` or ``Waveform``."""
        ...

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """The smallest valid features, and the tokens of each item."""
        ...


def media_tokenizer(model: PreTrainedModel, image_size: int | None, num_codebooks: int) -> MediaTokenizer:
    """The :class:`MediaTokenizer` over ``model``.

    Raises:
        UserError: not a media tokenizer, or a setting is missing.
    """
    if isinstance(model, MediaTokenizer):
        return model
    if isinstance(model, MelVQ):
        return MelTokenizer(model)
    if not hasattr(model, "encode"):
        raise UserError(
            f"{type(model).__name__} is no media tokenizer: it has no `encode`. Of a whole model save the tokenizer "
            "alone (such as JanusModel's `vqmodel`) with save_pretrained, and name that folder"
        )
    if "pixel_values" in inspect.signature(model.encode).parameters:
        _require_settings(model, ("channel_multiplier",), ("num_embeddings", "codebook_size"))
        return ImageVQTokenizer(model, image_size)
    _require_settings(model, ("codebook_size",), ("sampling_rate",), ("hop_length", "frame_rate"))
    return CodecTokenizer(model, num_codebooks)


def settings_of(codec: MediaTokenizer) -> set[str]:
    """Keys of a recipe's decoder that a media tokenizer has a use for."""
    if isinstance(codec, ImageVQTokenizer):
        return {"image_size"}
    ends = set() if codec.fixed_length else {"max_tokens"}
    return ends | ({"num_codebooks"} if isinstance(codec, CodecTokenizer) else set())


def _require_settings(model: PreTrainedModel, *settings: tuple[str, ...]) -> None:
    """One of each of ``settings`` must be in the config, as in those of transformers' own tokenizers."""
    missing = [" or ".join(names) for names in settings if not any(hasattr(model.config, name) for name in names)]
    if missing:
        raise UserError(
            f"{type(model).__name__} is no media tokenizer that omnitrain knows: its config has no "
            f"{', no '.join(missing)}; one of your own has the attributes and methods of "
            f"{MediaTokenizer.__module__}.{MediaTokenizer.__name__}"
        )


class ImageTargetAdapter(ComponentAdapter):
    """Images -> ``pixel_values`` ``[1, channels, size, size]`` in [-1, 1]."""

    modalities = ("image",)

    def __init__(self, size: int, num_tokens: int) -> None:
        """``size``: side, pixels; ``num_tokens``: codes of an image."""
        self.size, self.num_tokens = size, num_tokens

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """One target image; resized (bicubic) where it has another size."""
        image = media.convert("RGB")
        if image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), Image.Resampling.BICUBIC)
        pixels = np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1
        return {"pixel_values": np.ascontiguousarray(pixels[None])}, self.num_tokens


class ImageVQTokenizer:
    """A HF VQ model over square images of one size."""

    modality = "image"

    def __init__(self, model: PreTrainedModel, image_size: int | None) -> None:
        """Check the sizes.

        Raises:
            UserError: ``image_size`` is missing or does not fit the model.
        """
        config = model.config
        self.model = model
        stride = 2 ** (len(config.channel_multiplier) - 1)
        if image_size is None or image_size % stride:
            raise UserError(
                f"an image decoder needs image_size, a multiple of {stride} for this tokenizer: {image_size}"
            )
        self.image_size, self.side = image_size, image_size // stride
        self.fixed_length: int | None = self.side**2
        self.num_codes = getattr(config, "num_embeddings", None) or config.codebook_size

    def adapter(self) -> ImageTargetAdapter:
        """Images -> pixels."""
        return ImageTargetAdapter(self.image_size, self.side**2)

    def encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """``pixel_values`` ``[n, 3, size, size]`` -> ``[n * side * side]`` codes, row by row."""
        pixels = features["pixel_values"].to(self.model.dtype)
        wants_sizes = "image_sizes" in inspect.signature(self.model.encode).parameters
        sizes = {"image_sizes": torch.tensor([pixels.shape[-2:]] * len(pixels))} if wants_sizes else {}
        tokens = self.model.encode(pixels, **sizes).image_tokens
        return torch.cat([t.flatten() for t in tokens]) if isinstance(tokens, list) else tokens.flatten()

    def decode(self, codes: torch.Tensor) -> Image.Image:
        """``[side * side]`` codes -> an RGB image.

        Raises:
            UserError: the tokenizer has no decoder (Chameleon's in transformers).
        """
        if not hasattr(self.model, "decode"):
            raise UserError(f"{type(self.model).__name__} cannot decode: train with it, generate with Janus or Emu3 VQ")
        is_flat = "image_tokens" in inspect.signature(self.model.decode).parameters
        pixels = self.model.decode(codes[None] if is_flat else codes.view(1, self.side, self.side))[0]
        values = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return Image.fromarray(values.permute(1, 2, 0).cpu().numpy())

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """One black image."""
        return one_item(self.adapter(), "image", Image.new("RGB", (1, 1)))


class MelTargetAdapter(ComponentAdapter):
    """Waveforms -> log-mel frames, whole codes of them."""

    modalities = ("audio",)

    def __init__(self, config: MelVQConfig) -> None:
        """``config`` of the mel-VQ."""
        self.config = config

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """``frames`` ``[codes * frames_per_code, mels]``; tokens are the codes and the end."""
        samples = media.resampled(self.config.sampling_rate).samples
        frames = log_mel(torch.from_numpy(samples), self.config).numpy()
        return {"frames": frames}, len(frames) // self.config.frames_per_code + 1


class MelTokenizer:
    """Mel frames by the nearest vector of a codebook; back to sound by Griffin-Lim."""

    modality = "audio"
    fixed_length: int | None = None

    def __init__(self, model: MelVQ) -> None:
        """``model``: the codebook."""
        self.model = model
        self.num_codes = model.config.codebook_size

    def adapter(self) -> MelTargetAdapter:
        """Waveforms -> log-mel frames."""
        return MelTargetAdapter(self.model.config)

    def encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """``frames`` ``[codes * frames_per_code, mels]`` -> ``[codes]``."""
        return self.model.encode(features["frames"])

    def decode(self, codes: torch.Tensor) -> Waveform:
        """``[n]`` codes -> sound."""
        return Waveform(self.model.decode(codes).cpu().numpy(), self.model.config.sampling_rate)

    def minimal_input(self) -> tuple[TensorFeatures, tuple[int, ...]]:
        """The shortest silence."""
        silence = Waveform(np.zeros(1, dtype=np.float32), self.model.config.sampling_rate)
        return one_item(self.adapter(), "audio", silence)


class CodecTargetAdapter(ComponentAdapter):
    """Waveforms -> samples, padded with silence to whole codec frames."""

    modalities = ("audio",)

    def __init__(self, sampling_rate: int, hop: int, num_codebooks: int) -> None:
        """``hop``: samples per codec frame."""
        self.sampling_rate, self.hop, self.num_codebooks = sampling_rate, hop, num_codebooks

    def prepare(self, modality: str, media: Any) -> tuple[Features, int]:
        """``waveform`` ``[samples]``; tokens are the codes and the end."""
        samples = media.resampled(self.sampling_rate).samples
        samples = np.pad(samples, (0, -len(samples) % self.hop))
        count = len(samples) // self.hop * self.num_codebooks + 1
        return {"waveform": samples}, count


class CodecTokenizer:
    """A HF residual codec: codebook ``q`` of frame ``t`` is token ``t * num_codebooks + q``, in its own range."""

    modality = "audio"
    fixed_length: int | None = None

    def __init__(self, model: PreTrainedModel, num_codebooks: int) -> None:
        """``num_codebooks``: the first so many codebooks are modelled."""
        config = model.config
        self.model, self.num_codebooks = model, num_codebooks
        self.codebook_size = config.codebook_size
        self.num_codes = self.codebook_size * num_codebooks
        self.sampling_rate = config.sampling_rate
        hop = getattr(config, "hop_length", None)
        self.hop = int(hop if hop is not None else round(config.sampling_rate / config.frame_rate))

    def adapter(self) -> CodecTargetAdapter:
        """Waveforms -> samples."""
        return CodecTargetAdapter(self.sampling_rate, self.hop, self.num_codebooks)

    def encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> torch.Tensor:
        """``waveform`` ``[samples of all clips]`` -> ``[n]`` codes.

        One clip at a time: a codec's convolutions would otherwise see the padding of its neighbours.
        """
        num_samples = [(count - 1) // self.num_codebooks * self.hop for count in num_tokens]
        clips = features["waveform"].to(self.model.dtype).split(num_samples)
        return torch.cat([self._flatten(self._clip_codes(clip[None, None])) for clip in clips])

    def _clip_codes(self, clip: torch.Tensor) -> torch.Tensor:
        """``[1, 1, samples] -> [codebooks, frames]``."""
        codes = self.model.encode(clip).audio_codes
        return codes.reshape(-1, *codes.shape[-2:])[0][: self.num_codebooks]

    def _flatten(self, codes: torch.Tensor) -> torch.Tensor:
        if codes.size(0) < self.num_codebooks:
            raise UserError(
                f"{type(self.model).__name__} gives {codes.size(0)} codebooks, asked for {self.num_codebooks}"
            )
        offsets = torch.arange(self.num_codebooks, device=codes.device)[:, None] * self.codebook_size
        return (codes + offsets).t().flatten()

    def decode(self, codes: torch.Tensor) -> Waveform:
        """``[frames * num_codebooks]`` codes -> sound; a last frame that is not whole is left out."""
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
        """One frame of silence."""
        return one_item(self.adapter(), "audio", Waveform(np.zeros(self.hop, dtype=np.float32), self.sampling_rate))
