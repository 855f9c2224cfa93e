"""``InContextDecoder`` generates images or films as latents that are denoised among the tokens of the foundation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.data.packing.sample import SEEDS
from omnitrain.models.components.protocols import ComponentAdapter, Draw, TensorFeatures
from omnitrain.models.decoders.flow import FREQUENCIES, NOISE, TIME, LatentDecoder, waves
from omnitrain.ops.device import to_device
from omnitrain.ops.draws import normals, uniforms
from omnitrain.ops.loss.linear import LossTerm
from omnitrain.recipe.component_configs import InContextDecoderConfig


class InContextDecoder(LatentDecoder):
    """The latents of an item are tokens that see each other, with noise of one time; the head predicts velocities.

    So the foundation denoises them, as in Transfusion, Show-o2 and BAGEL. A label is the velocity from noise to data.
    """

    config: InContextDecoderConfig
    config_class = InContextDecoderConfig

    def __init__(self, config: InContextDecoderConfig, tokenizer: PreTrainedModel | None = None) -> None:
        """``tokenizer``: a model that makes latents; None: one with random weights."""
        super().__init__(config, tokenizer)
        channels, hidden = self.codec.num_channels, config.hidden_size
        self.embedding = nn.Linear(channels, hidden)
        self.time = nn.Sequential(nn.Linear(2 * FREQUENCIES, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.head = nn.Linear(hidden, channels)
        self.post_init()

    def adapter(self) -> ComponentAdapter:
        """Return the converter from target media to input features, for data workers."""
        adapter = super().adapter()
        adapter.is_block = True
        return adapter

    def lm_encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return embeddings ``[sum(num_tokens), hidden]``, and labels ``[sum(num_tokens), channels]`` fp32.

        The time is drawn for each item. In prompts it is 1: there is no noise.
        """
        seeds = features[SEEDS]
        with torch.no_grad():
            latents, noise = self.codec.encode(features), normals(seeds, self.codec.num_channels, NOISE)
            counts = torch.tensor(num_tokens)
            first = to_device((counts.cumsum(0) - counts).repeat_interleave(counts), seeds.device)
            time = uniforms(seeds[first], 1, TIME).float().where(seeds[:, None] != 0, 1.0)
        return self._embedded(noise + time * (latents - noise), time), latents - noise

    def _embedded(self, latents: Tensor, time: Tensor) -> Tensor:
        dtype = self.embedding.weight.dtype
        embeds: Tensor = self.embedding(latents.to(dtype)) + self.time(waves(time).to(dtype))
        return embeds

    def lm_head(self, hidden: Tensor, labels: Tensor) -> LossTerm:
        """Return the mean squared error of velocities, predicted from the tokens' own states ``[n, hidden]``."""
        rows = (self.head(hidden).float() - labels).square().mean(dim=1)
        return LossTerm(rows.sum(), len(rows), rows.detach())

    def minimal_labels(self) -> Tensor:
        """See :class:`DecoderMixin`."""
        return torch.zeros(1, self.codec.num_channels)

    def lm_embed(self, hidden: Tensor, draw: Draw) -> tuple[Tensor, Tensor | None]:
        """Move the latents of items by one step (see :class:`DecoderMixin`)."""
        steps, count = self.config.num_steps, self.codec.length(()) * (self.num_frames or 1)
        if draw.state is None:
            step, latents = 0, draw.noise(count * self.codec.num_channels).unflatten(1, (count, -1))
        else:
            step, latents = draw.state[0] + 1, draw.state[1] + draw.guided(self.head(hidden).float()) / steps
        draw.state = step, latents
        time = latents.new_full((*latents.shape[:2], 1), step / steps)
        return self._embedded(latents, time), latents if step == steps else None
