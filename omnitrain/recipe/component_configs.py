"""Config classes of omnitrain's models, registered with ``AutoConfig``; recipes write them as dicts."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig


class OmniConfig(PreTrainedConfig):
    """Config of ``OmniModel``: the config of every component, as plain dicts with ``model_type``.

    Attributes:
        teachers: component name -> config of a ``Teacher``; like its weights, it is not saved.
        unused_tensors: name prefix -> number of tensors in the foundation's checkpoint that the foundation does not
            have.
        source_path: folder or Hub id of that checkpoint.
        has_own_head: whether that checkpoint has a head of its own although its config ties it to the embeddings.
        condition_dropout: whether it was trained with ``data.condition_dropout.whole``, which guidance needs.
    """

    model_type = "omnitrain"

    foundation: dict | None = None
    encoders: dict | None = None
    decoders: dict | None = None
    teachers: dict | None = None
    unused_tensors: dict | None = None
    source_path: str | None = None
    has_own_head: bool = False
    condition_dropout: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return what is saved: all but the teachers."""
        return {key: value for key, value in super().to_dict().items() if key != "teachers"}


class VisionEncoderConfig(PreTrainedConfig):
    """Config of ``VisionEncoder``: of the HF tower, its image processor and the projector, as dicts.

    ``hidden_size`` is the foundation's. Of a video, ``fps`` frames of each second are read, all if None, at most
    ``max_frames``.
    """

    model_type = "omnitrain_vision_encoder"

    tower: dict | None = None
    processor: dict | None = None
    projector: dict | None = None
    hidden_size: int = 0
    max_frames: int = 32
    fps: float | None = None


class AudioEncoderConfig(PreTrainedConfig):
    """Config of ``AudioEncoder``: as :class:`VisionEncoderConfig`, with a HF feature extractor."""

    model_type = "omnitrain_audio_encoder"

    tower: dict | None = None
    processor: dict | None = None
    projector: dict | None = None
    hidden_size: int = 0


class TeacherConfig(PreTrainedConfig):
    """Config of ``Teacher``: that of a HF causal language model."""

    model_type = "omnitrain_teacher"

    model: dict | None = None


class TokenDecoderConfig(PreTrainedConfig):
    """Config of ``TokenDecoder``: of the HF media tokenizer, as a dict.

    Attributes:
        hidden_size: hidden size of the foundation.
        image_size: side of target images, pixels (images only).
        image_sizes: sizes of target images in place of it, ``WIDTHxHEIGHT``.
        num_codebooks: number of codebooks of a residual codec, flattened in time order (audio only).
        max_tokens: maximum number of tokens to generate for an item.
        initializer_range: standard deviation of the fresh embedding and head.
    """

    model_type = "omnitrain_token_decoder"

    tokenizer: dict | None = None
    hidden_size: int = 0
    image_size: int | None = None
    image_sizes: list | None = None
    num_codebooks: int = 1
    max_tokens: int = 1024
    initializer_range: float = 0.02


class FlowDecoderConfig(PreTrainedConfig):
    """Config of ``FlowDecoder``: of the model that makes latents of media, as a dict.

    Attributes:
        hidden_size: hidden size of the foundation.
        image_size: side of target images, pixels.
        width: of the velocity network.
        depth: its number of blocks.
        num_steps: steps of the integration from noise to a latent.
        initializer_range: standard deviation of the fresh weights.
    """

    model_type = "omnitrain_flow_decoder"

    tokenizer: dict | None = None
    hidden_size: int = 0
    image_size: int | None = None
    width: int = 256
    depth: int = 3
    num_steps: int = 16
    initializer_range: float = 0.02


class PatchCodecConfig(PreTrainedConfig):
    """Config of ``PatchCodec``; ``patch_size``: side of the square of pixels that is one token."""

    model_type = "omnitrain_patches"

    patch_size: int = 4


class MelVQConfig(PreTrainedConfig):
    """Config of ``MelVQ``, with everything that ``log_mel`` needs, so that data workers need no weights.

    Attributes:
        sampling_rate: Hz.
        n_fft: samples of the (Hann) analysis window.
        hop_length: samples between frames; at most ``n_fft // 2``, so that frames overlap enough for synthesis.
        num_mels: number of bands between ``min_frequency`` and half the sampling rate.
        min_frequency: lower edge of the lowest band, Hz.
        floor: magnitudes below this count as silence; 1.0 is a sine of full scale.
        frames_per_code: frames quantised together.
        codebook_size: number of codes.
        num_iterations: iterations of Griffin-Lim.
    """

    model_type = "omnitrain_mel_vq"

    sampling_rate: int = 8000
    n_fft: int = 256
    hop_length: int = 80
    num_mels: int = 40
    min_frequency: float = 0.0
    floor: float = 3e-3
    frames_per_code: int = 4
    codebook_size: int = 256
    num_iterations: int = 60


CONFIGS: dict[str, type[PreTrainedConfig]] = {
    config.model_type: config
    for config in (
        OmniConfig,
        VisionEncoderConfig,
        AudioEncoderConfig,
        TeacherConfig,
        TokenDecoderConfig,
        FlowDecoderConfig,
        MelVQConfig,
        PatchCodecConfig,
    )
}
for _model_type, _config in CONFIGS.items():
    AutoConfig.register(_model_type, _config)
