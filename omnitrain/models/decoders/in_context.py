"""``InContextDecoder`` generates images or films as latents that are denoised among the tokens of the foundation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.data.packing.sample import SEEDS
from omnitrain.models.components.protocols import ComponentAdapter, Draw, TensorFeatures
from omnitrain.models.decoders.flow import FREQUENCIES, NOISE, TIME, LatentDecoder, waves
from omnitrain.ops.draws import normals
from omnitrain.ops.host_values import to_device
from omnitrain.ops.loss.linear import LossTerm
from omnitrain.recipe.component_configs import InContextDecoderConfig

_TIME_MEAN, _TIME_DEVIATION = -0.8, 0.8  # of the logit of the time in training


class InContextDecoder(LatentDecoder):
    """The latents of an item are tokens that see each other, with noise of one time.

    So the foundation denoises them, as in Transfusion, Show-o2 and BAGEL. The head predicts the latents without noise,
    which need fewer dims of a hidden state than velocities, which have the noise (Li and He, "Back to basics: let
    denoising generative models denoise", 2025). The loss is the squared error of
    the velocity that leads from the noised latents to the predicted ones. A label is a latent and its remaining time,
    ``1 - time``.
    """

    config: InContextDecoderConfig
    config_class = InContextDecoderConfig

    def __init__(self, config: InContextDecoderConfig, tokenizer: PreTrainedModel | None = None) -> None:
        """``tokenizer``: a model that makes latents; None: one with random weights."""
        super().__init__(config, tokenizer)
        channels, hidden = self.codec.num_channels, config.hidden_size
        self.embedding = nn.Linear(channels, hidden)
        self.places = nn.Embedding((self.num_frames or 1) + 2 * self.codec.side, hidden)  # of frame, row and column
        self.time = nn.Sequential(nn.Linear(2 * FREQUENCIES, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.head = nn.Linear(hidden, channels)
        self.post_init()

    def adapter(self) -> ComponentAdapter:
        """Return the converter from target media to input features, for data workers."""
        adapter = super().adapter()
        adapter.is_block = True
        return adapter

    def lm_encode(self, features: TensorFeatures, num_tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return embeddings ``[sum(num_tokens), hidden]``, and labels ``[sum(num_tokens), channels + 1]`` fp32.

        The time is drawn for each item, more often an early one. In prompts it is 1: there is no noise.
        """
        seeds, of_items = features[SEEDS], (len(num_tokens), num_tokens[0])
        with torch.no_grad():
            latents, noise = self.codec.encode(features), normals(seeds, self.codec.num_channels, NOISE)
            time = torch.sigmoid(_TIME_MEAN + _TIME_DEVIATION * normals(seeds.view(of_items)[:, 0], 1, TIME))
            time = time.repeat_interleave(num_tokens[0], dim=0).where(seeds[:, None] != 0, 1.0)
            noised = noise + time * (latents - noise)
        embeds = self._embedded(noised.unflatten(0, of_items), time.unflatten(0, of_items))
        return embeds.flatten(0, 1), torch.cat([latents, 1 - time], dim=1)

    def _embedded(self, latents: Tensor, time: Tensor) -> Tensor:
        """``[items, n, channels]`` and ``[items, n, 1]`` -> ``[items, n, hidden]``."""
        dtype, frames, side = self.embedding.weight.dtype, self.num_frames or 1, self.codec.side
        starts = zip((0, frames, frames + side), (frames, side, side), strict=True)
        places = torch.cartesian_prod(*(torch.arange(start, start + size) for start, size in starts))
        of_places = self.places(to_device(places, latents.device)).sum(dim=1)
        embeds: Tensor = self.embedding(latents.to(dtype)) + self.time(waves(time).to(dtype)) + of_places
        return embeds

    def lm_head(self, hidden: Tensor, labels: Tensor) -> LossTerm:
        """Return the mean squared error of velocities, predicted from the tokens' own states ``[n, hidden]``.

        The remaining time that divides an error is at least the step of generation, ``1 / num_steps``.
        """
        latents, remaining = labels[:, :-1], labels[:, -1:].clamp(min=1 / self.config.num_steps)
        rows = ((self.head(hidden).float() - latents) / remaining).square().mean(dim=1)
        return LossTerm(rows.sum(), len(rows), rows.detach())

    def minimal_labels(self) -> Tensor:
        """See :class:`DecoderMixin`."""
        return torch.zeros(1, self.codec.num_channels + 1)

    def lm_embed(self, hidden: Tensor, draw: Draw) -> tuple[Tensor, Tensor | None]:
        """Move the latents of items by one step (see :class:`DecoderMixin`)."""
        steps, count = self.config.num_steps, self.codec.length(()) * (self.num_frames or 1)
        if draw.state is None:
            step, latents = 0, draw.noise(count * self.codec.num_channels).unflatten(1, (count, -1))
        else:
            step, latents = draw.state
            latents = latents + (draw.guided(self.head(hidden).float()) - latents) / (steps - step)
            step += 1
        draw.state = step, latents
        time = latents.new_full((*latents.shape[:2], 1), step / steps)
        return self._embedded(latents, time), latents if step == steps else None
