"""``FlowDecoder`` generates a modality as latents, each by a small flow from noise, as Li et al. 2024."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.data.packing.sample import SEEDS
from omnitrain.models.components.protocols import Draw, TensorFeatures
from omnitrain.models.decoders.codec_decoder import CodecDecoder
from omnitrain.models.decoders.latents import ImageLatents
from omnitrain.ops.draws import normals, uniforms
from omnitrain.ops.loss.linear import LossTerm
from omnitrain.recipe.component_configs import FlowDecoderConfig

NOISE, TIME = 0, 1  # streams of random numbers
FREQUENCIES = 32


class _Block(nn.Module):
    """A residual MLP whose norm is scaled, shifted and gated by the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, states: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition).chunk(3, dim=-1)
        changed: Tensor = self.mlp(self.norm(states) * (1 + scale) + shift)
        return states + gate * changed


class VelocityNetwork(nn.Module):
    """The velocity at which a latent moves from noise (time 0) to data (time 1), given a hidden state."""

    def __init__(self, channels: int, hidden_size: int, width: int, depth: int) -> None:
        """Make ``depth`` blocks of ``width``."""
        super().__init__()
        self.enter, self.condition = nn.Linear(channels, width), nn.Linear(hidden_size, width)
        self.time = nn.Sequential(nn.Linear(2 * FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.leave = nn.Linear(width, channels)

    def forward(self, latents: Tensor, time: Tensor, hidden: Tensor) -> Tensor:
        """Return velocities ``[n, channels]`` fp32 of latents ``[n, channels]`` at ``time`` ``[n, 1]``.

        ``hidden``: ``[n, hidden]``.
        """
        dtype = self.enter.weight.dtype
        condition = self.time(waves(time).to(dtype)) + self.condition(hidden.to(dtype))
        condition = nn.functional.silu(condition)
        states = self.enter(latents.to(dtype))
        for block in self.blocks:
            states = block(states, condition)
        velocity: Tensor = self.leave(self.norm(states))
        return velocity.float()


def waves(time: Tensor) -> Tensor:
    """Return ``[..., 2 * FREQUENCIES]``, cosines and sines of ``[..., 1]``, of periods from a tenth to a thousand."""
    exponents = torch.arange(FREQUENCIES, device=time.device) / (FREQUENCIES - 1)
    angles = 2 * math.pi * time.float() * 10 ** (1 - 4 * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class LatentDecoder(CodecDecoder):
    """A decoder whose tokens are latents of a frozen model."""

    unused_sampling = frozenset({"temperature", "top_k", "top_p"})

    @cached_property
    def codec(self) -> ImageLatents:
        """The converter of media to latents and back."""
        return ImageLatents(self.tokenizer, self.config.image_size, self.config.patch_size)

    @property
    def settings(self) -> set[str]:
        """See :class:`CodecDecoder`."""
        return {"image_size", "num_frames", "fps", "flow"}

    def lm_generate(self, tokens: list[Any]) -> Any:
        """Decode latents to a ``PIL.Image`` or a ``Clip``."""
        return self.decoded(torch.tensor(tokens, device=next(self.parameters()).device))


class FlowDecoder(LatentDecoder):
    """A velocity network for the latents of a frozen model, and a projection of them to the foundation's input.

    A label is a latent, the noise from which it is reached, and the time of the way at which the velocity is learnt.
    """

    config: FlowDecoderConfig
    config_class = FlowDecoderConfig

    def __init__(self, config: FlowDecoderConfig, tokenizer: PreTrainedModel | None = None) -> None:
        """``tokenizer``: a model that makes latents; None: one with random weights."""
        super().__init__(config, tokenizer)
        channels = self.codec.num_channels
        self.embedding = nn.Linear(channels, config.hidden_size)
        self.velocity = VelocityNetwork(channels, config.hidden_size, config.width, config.depth)
        self.post_init()

    def lm_encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return embeddings ``[sum(num_tokens), hidden]``, and labels ``[sum(num_tokens), 2 * channels + 1]`` fp32."""
        seeds, channels = features[SEEDS], self.codec.num_channels
        with torch.no_grad():
            latents = self.codec.encode(features)
            noise, time = normals(seeds, channels, NOISE), uniforms(seeds, 1, TIME)
        return self._embedded(latents), torch.cat([latents, noise, time.float()], dim=1)

    def _embedded(self, latents: Tensor) -> Tensor:
        embeds: Tensor = self.embedding(latents.to(self.embedding.weight.dtype))
        return embeds

    def lm_head(self, hidden: Tensor, labels: Tensor) -> LossTerm:
        """Return the mean squared error of velocities, predicted from hidden states ``[n, hidden]``."""
        channels = self.codec.num_channels
        latents, noise, time = labels.split([channels, channels, 1], dim=1)
        velocity = self.velocity(noise + time * (latents - noise), time, hidden)
        rows = (velocity - (latents - noise)).square().mean(dim=1)
        return LossTerm(rows.sum(), len(rows), rows.detach())

    def minimal_labels(self) -> Tensor:
        """See :class:`DecoderMixin`."""
        return torch.zeros(1, 2 * self.codec.num_channels + 1)

    def lm_embed(self, hidden: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Integrate from noise to the next latent of each sequence, and embed it (see :class:`DecoderMixin`)."""
        latents, steps = draw.noise(self.codec.num_channels), self.config.num_steps
        copies = len(hidden) // len(latents)
        for step in range(steps):
            of_copies = latents.repeat(copies, 1)
            time = of_copies.new_full((len(of_copies), 1), step / steps)
            latents = latents + draw.guided(self.velocity(of_copies, time, hidden[:, -1])) / steps
        return self._embedded(latents)[:, None], latents[:, None]
