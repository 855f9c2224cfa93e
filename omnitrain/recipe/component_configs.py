"""Config classes of omnitrain's models, registered with ``AutoConfig``; recipes write them as dicts."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig


class OmniConfig(PreTrainedConfig):
    """Config of ``OmniModel``: the config of every component, as plain dicts with ``model_type``."""

    model_type = "omnitrain"

    foundation: dict | None = None
    encoders: dict | None = None
    decoders: dict | None = None
    teachers: dict | None = None  # component name -> config of a `Teacher`; like its weights, it is not saved
    unused_tensors: dict | None = None  # name prefix -> tensors in the foundation's checkpoint that it does not have
    source_path: str | None = None  # folder or Hub id of that checkpoint
    has_own_head: bool = False  # whether that checkpoint has a head although its config ties it
    condition_dropout: bool = False  # whether it was trained with `data.condition_dropout.whole`, which guidance needs

    def to_dict(self) -> dict[str, Any]:
        """Return what is saved: all but the teachers."""
        return {key: value for key, value in super().to_dict().items() if key != "teachers"}


class JoinedTowersConfig(PreTrainedConfig):
    """Config of ``JoinedTowers``: of HF towers, as dicts; ``hidden_size``: of all of them together."""

    model_type = "omnitrain_joined_towers"

    towers: list | None = None
    hidden_size: int = 0


class VisionEncoderConfig(PreTrainedConfig):
    """Config of ``VisionEncoder``: of the HF tower, its image processor and the projector, as dicts."""

    model_type = "omnitrain_vision_encoder"

    tower: dict | None = None
    processor: dict | None = None
    more_processors: list | None = None  # of joined towers, the image processors of all but the first one
    projector: dict | None = None
    hidden_size: int = 0  # the foundation's
    max_frames: int = 32  # of a video
    fps: float | None = None  # frames of each second of a video; None: all, at most `max_frames`


class AudioEncoderConfig(PreTrainedConfig):
    """Config of ``AudioEncoder``: as :class:`VisionEncoderConfig`, with a HF feature extractor."""

    model_type = "omnitrain_audio_encoder"

    tower: dict | None = None
    processor: dict | None = None
    projector: dict | None = None
    hidden_size: int = 0


class TeacherConfig(PreTrainedConfig):
    """Config of ``Teacher``: that of a HF causal language model, and how a student is compared with it.

    Attributes:
        divergence: kind of :class:`~omnitrain.ops.loss.divergence.Divergence`; None: losses of the user compare.
        temperature: see :class:`~omnitrain.ops.loss.divergence.Divergence`.
        top_k: see :class:`~omnitrain.ops.loss.divergence.Divergence`.
        sources: names of the data sources whose samples it reads; None: of all.
    """

    model_type = "omnitrain_teacher"

    model: dict | None = None
    divergence: str | None = None
    temperature: float = 1.0
    top_k: int | None = None
    sources: list | None = None


class TokenDecoderConfig(PreTrainedConfig):
    """Config of ``TokenDecoder``: of the HF media tokenizer, as a dict."""

    model_type = "omnitrain_token_decoder"

    tokenizer: dict | None = None
    hidden_size: int = 0  # hidden size of the foundation
    image_size: int | None = None  # side of target images, pixels (images only)
    image_sizes: list | None = None  # sizes of target images in place of it, `WIDTHxHEIGHT`
    num_frames: int | None = None  # of target films, whose frames are images of `image_size`; None: no films
    fps: float = 8.0  # frames per second of generated films
    num_codebooks: int = 1  # number of codebooks of a residual codec, flattened in time order (audio only)
    max_tokens: int = 1024  # maximum number of tokens to generate for an item
    initializer_range: float = 0.02  # standard deviation of the fresh embedding and head
    # names of the foundation's modules that are the tokenizer, embedding and head; None: it has its own
    of_foundation: dict | None = None


class _LatentDecoderConfig(PreTrainedConfig):
    """Config of a decoder that makes latents of media; ``tokenizer``: of the model that makes them, as a dict."""

    tokenizer: dict | None = None
    hidden_size: int = 0  # hidden size of the foundation
    image_size: int | None = None  # side of target images, pixels
    num_frames: int | None = None  # of target films, whose frames are images of `image_size`; None: no films
    fps: float = 8.0  # frames per second of generated films
    patch_size: int = 1  # side of the square of latents that is one token
    num_steps: int = 16  # steps of the integration from noise to a latent
    initializer_range: float = 0.02  # standard deviation of the fresh weights


class FlowDecoderConfig(_LatentDecoderConfig):
    """Config of ``FlowDecoder``."""

    model_type = "omnitrain_flow_decoder"

    width: int = 256  # of the velocity network
    depth: int = 3  # its number of blocks


class InContextDecoderConfig(_LatentDecoderConfig):
    """Config of ``InContextDecoder``."""

    model_type = "omnitrain_in_context_decoder"


class PatchCodecConfig(PreTrainedConfig):
    """Config of ``PatchCodec``; ``patch_size``: side of the square of pixels that is one token."""

    model_type = "omnitrain_patches"

    patch_size: int = 4
    hidden_size: int = 0  # numbers in a latent; the model sets it


class LatentVAEConfig(PreTrainedConfig):
    """Config of ``LatentVAE``; ``vae``: the config of an ``AutoencoderKL`` of diffusers."""

    model_type = "omnitrain_vae"

    vae: dict | None = None
    patch_size: int = 0  # side of the square of pixels that is one latent; the model sets it
    hidden_size: int = 0  # numbers in a latent; the model sets it


class MelVQConfig(PreTrainedConfig):
    """Config of ``MelVQ``, with everything that ``log_mel`` needs, so that data workers need no weights."""

    model_type = "omnitrain_mel_vq"

    sampling_rate: int = 8000  # Hz
    n_fft: int = 256  # samples of the (Hann) analysis window
    hop_length: int = 80  # samples between frames; at most `n_fft // 2`, so that frames overlap enough for synthesis
    num_mels: int = 40  # number of bands between `min_frequency` and half the sampling rate
    min_frequency: float = 0.0  # lower edge of the lowest band, Hz
    floor: float = 3e-3  # magnitudes below this count as silence; 1.0 is a sine of full scale
    frames_per_code: int = 4  # frames quantised together
    codebook_size: int = 256  # number of codes
    num_iterations: int = 60  # iterations of Griffin-Lim


CONFIGS: dict[str, type[PreTrainedConfig]] = {
    config.model_type: config
    for config in (
        OmniConfig,
        JoinedTowersConfig,
        VisionEncoderConfig,
        AudioEncoderConfig,
        TeacherConfig,
        TokenDecoderConfig,
        FlowDecoderConfig,
        InContextDecoderConfig,
        LatentVAEConfig,
        MelVQConfig,
        PatchCodecConfig,
    )
}
for _model_type, _config in CONFIGS.items():
    AutoConfig.register(_model_type, _config)
