"""``MelVQ`` encodes sound as codes; a code is the nearest codebook vector of a few log-mel frames.

There is no network: the codebook comes from k-means, and Griffin-Lim finds a phase for the decoded magnitudes. This is
enough for short, clean speech, trains in seconds, and lets a language model generate sound with one code per 40 ms.
The waveform is padded with zeros to whole codes; frame ``i`` is centred on sample ``i * hop_length``.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from transformers import AutoModel, PreTrainedModel
from transformers.audio_utils import mel_filter_bank

from omnitrain.recipe.component_configs import MelVQConfig

_MOMENTUM = 0.99  # of fast Griffin-Lim


class MelVQ(PreTrainedModel):
    """Encode log-mel frames as codes and decode codes to a waveform.

    ``codebook``, ``[codebook_size, frames_per_code * num_mels]``, gets no gradient. It is no buffer, since HF takes a
    model's dtype from its parameters.
    """

    config: MelVQConfig
    config_class = MelVQConfig
    base_model_prefix = "mel_vq"
    main_input_name = "log_mel"

    def __init__(self, config: MelVQConfig) -> None:
        """Draw a random codebook; k-means or ``from_pretrained`` replaces it. ValueError: hop too long for window."""
        super().__init__(config)
        if 2 * config.hop_length > config.n_fft:
            raise ValueError(f"hop_length {config.hop_length} is more than half of n_fft {config.n_fft}")
        vectors = torch.randn(config.codebook_size, config.frames_per_code * config.num_mels)
        self.codebook = torch.nn.Parameter(vectors, requires_grad=False)
        self.post_init()

    @torch.no_grad()
    def encode(self, log_mel: torch.Tensor) -> torch.Tensor:
        """Return ``[n]`` int64: nearest vectors of ``[n * frames_per_code, num_mels]``; ValueError: another shape."""
        num_frames, num_bands = log_mel.shape
        if num_bands != self.config.num_mels or num_frames % self.config.frames_per_code:
            expected = f"[n * {self.config.frames_per_code}, {self.config.num_mels}]"
            raise ValueError(f"log-mel frames of shape {[num_frames, num_bands]}, expected {expected}")
        vectors = log_mel.float().reshape(-1, self.codebook.size(1))
        codebook = self.codebook.float()
        # |v - c|^2 = |v|^2 - 2 (v . c - |c|^2 / 2); the first term is the same for every code.
        return (vectors @ codebook.t() - codebook.square().sum(1) / 2).argmax(1)

    @torch.no_grad()
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Decode codes ``[n]`` to float32 ``[n * frames_per_code * hop_length]`` in [-1, 1], or raise ValueError."""
        if codes.numel() == 0:
            return torch.zeros(0, device=codes.device)
        if codes.min() < 0 or codes.max() >= self.config.codebook_size:
            code_range = f"{int(codes.min())}..{int(codes.max())}"
            raise ValueError(f"codes {code_range} outside of the codebook, 0..{self.config.codebook_size - 1}")
        frames = self.codebook[codes].float().view(-1, self.config.num_mels)
        waveform = griffin_lim(linear_magnitude(frames, self.config), self.config)
        return waveform / waveform.abs().max().clamp(min=1.0)


def num_codes(num_samples: int, config: MelVQConfig) -> int:
    """Return the number of codes of a waveform of ``num_samples`` samples; the last code is padded with silence."""
    return math.ceil(num_samples / (config.hop_length * config.frames_per_code))


@torch.no_grad()
def log_mel(waveform: torch.Tensor, config: MelVQConfig) -> torch.Tensor:
    """Compute the natural logarithm of mel band magnitudes; this needs no weights.

    ``waveform``: float32 ``[samples]`` in [-1, 1] at ``config.sampling_rate``; ValueError: another shape, or empty.
    Returns float32 ``[num_codes * frames_per_code, num_mels]``, each ``log(max(magnitude, config.floor))``.
    """
    if waveform.dim() != 1 or not len(waveform):
        raise ValueError(f"a waveform of shape {list(waveform.shape)}, expected [samples]")
    num_frames = num_codes(len(waveform), config) * config.frames_per_code
    padded = torch.nn.functional.pad(waveform.float(), (0, num_frames * config.hop_length - len(waveform)))
    magnitude = _stft(padded, config).abs()[:, :num_frames]
    filters = _mel_filters(config.n_fft, config.num_mels, config.min_frequency, config.sampling_rate)
    return (magnitude.t() @ filters.to(magnitude.device)).clamp(min=config.floor).log()


def linear_magnitude(log_mel: torch.Tensor, config: MelVQConfig) -> torch.Tensor:
    """Convert log-mel ``[num_frames, num_mels]`` to magnitudes ``[n_fft // 2 + 1, num_frames]`` by a pseudo-inverse."""
    inverse = _inverse_filters(config.n_fft, config.num_mels, config.min_frequency, config.sampling_rate)
    mel = (log_mel.exp() - config.floor).clamp(min=0)
    return (mel @ inverse.to(mel.device)).clamp(min=0).t()


def griffin_lim(magnitude: torch.Tensor, config: MelVQConfig) -> torch.Tensor:
    """Convert magnitudes ``[n_fft // 2 + 1, num_frames]`` to ``[num_frames * hop_length]`` audio samples.

    Fast Griffin-Lim (Perraudin, Balazs, Sondergaard 2013) from a fixed random phase.
    """
    num_samples = magnitude.size(1) * config.hop_length
    generator = torch.Generator().manual_seed(0)
    phase = torch.rand(magnitude.shape, generator=generator).to(magnitude.device) * (2 * math.pi)
    estimate = torch.polar(torch.ones_like(magnitude), phase)
    previous = torch.zeros_like(estimate)
    for _ in range(config.num_iterations):
        rebuilt = _stft(_istft(magnitude * estimate, num_samples, config), config)[:, : magnitude.size(1)]
        accelerated = rebuilt + _MOMENTUM * (rebuilt - previous)
        estimate = accelerated / accelerated.abs().clamp(min=1e-8)
        previous = rebuilt
    return _istft(magnitude * estimate, num_samples, config)


def _stft(waveform: torch.Tensor, config: MelVQConfig) -> torch.Tensor:
    """``[samples]`` -> complex ``[n_fft // 2 + 1, samples // hop_length + 1]``; full scale has magnitude 1."""
    window = _window(config.n_fft).to(waveform.device)
    return torch.stft(
        waveform, config.n_fft, config.hop_length, window=window, pad_mode="constant", return_complex=True
    )


def _istft(spectrum: torch.Tensor, num_samples: int, config: MelVQConfig) -> torch.Tensor:
    """Invert :func:`_stft`, by least squares if the frames are inconsistent."""
    window = _window(config.n_fft).to(spectrum.device)
    return torch.istft(spectrum, config.n_fft, config.hop_length, window=window, length=num_samples)


@lru_cache(maxsize=8)
def _window(n_fft: int) -> torch.Tensor:
    """Hann window ``[n_fft]`` whose sum is 2, so that a sine of amplitude 1 has a peak of 1."""
    window = torch.hann_window(n_fft, device="cpu")
    return window * (2 / window.sum())


@lru_cache(maxsize=8)
def _mel_filters(n_fft: int, num_mels: int, min_frequency: float, sampling_rate: int) -> torch.Tensor:
    """``[n_fft // 2 + 1, num_mels]`` float32, triangles of height 1."""
    filters = mel_filter_bank(n_fft // 2 + 1, num_mels, min_frequency, sampling_rate / 2, sampling_rate)
    return torch.from_numpy(filters).float()


@lru_cache(maxsize=8)
def _inverse_filters(n_fft: int, num_mels: int, min_frequency: float, sampling_rate: int) -> torch.Tensor:
    """``[num_mels, n_fft // 2 + 1]`` float32."""
    return torch.linalg.pinv(_mel_filters(n_fft, num_mels, min_frequency, sampling_rate))


AutoModel.register(MelVQConfig, MelVQ)
