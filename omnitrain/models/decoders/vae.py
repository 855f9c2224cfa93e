"""``LatentVAE``: an ``AutoencoderKL`` of diffusers as a model of transformers that makes latents of images."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig

from omnitrain.errors import UserError
from omnitrain.models.decoders.latents import LatentModel
from omnitrain.packages import install_command
from omnitrain.recipe.component_configs import LatentVAEConfig
from omnitrain.transformers_private import keep_weights

_CLASS = "AutoencoderKL"
SCALES = ("scaling_factor", "shift_factor")  # of its config: they scale and shift its latents


class LatentVAE(LatentModel):
    """The mean of the latents of a VAE, shifted and scaled to a standard deviation near 1."""

    config: LatentVAEConfig
    config_class = LatentVAEConfig
    vae: Any

    def __init__(self, config: LatentVAEConfig, vae: nn.Module | None = None) -> None:
        """``vae``: with weights; None: one with random weights.

        Raises:
            UserError: diffusers is not installed, or the config has no scale of the latents.
        """
        values = config.vae or {}
        ready: Any = _class().from_config(values) if vae is None else vae
        super().__init__(config, 2 ** (len(ready.config.block_out_channels) - 1), ready.config.latent_channels)
        self.vae = ready
        self.scale, self.shift = self.vae.config.scaling_factor, self.vae.config.shift_factor or 0.0
        if not self.scale:
            raise UserError(
                f"{_CLASS}: `scaling_factor` of its config: found {self.scale}; expected 1 / the standard deviation of "
                "its latents, so that noise and latents have one scale"
            )
        if given := [key for key in ("latents_mean", "latents_std") if getattr(self.vae.config, key, None) is not None]:
            raise UserError(
                f"{_CLASS}: its config scales each channel ({', '.join(given)}), which has no support; use a VAE with "
                "`scaling_factor` and `shift_factor` alone"
            )
        config.vae = values | {"scaling_factor": self.scale, "shift_factor": self.shift}  # not defaults of a version
        keep_weights(self.vae)
        self.post_init()

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """See :class:`LatentModel`."""
        latents: torch.Tensor = self.vae.encode(pixels).latent_dist.mode()
        return (latents - self.shift) * self.scale

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """See :class:`LatentModel`."""
        pixels: torch.Tensor = self.vae.decode(latents / self.scale + self.shift).sample
        return pixels


AutoModel.register(LatentVAEConfig, LatentVAE)


def vae_at(path: str, *, with_weights: bool = True) -> LatentVAE | None:
    """Load the VAE in a folder or Hub id of diffusers; None: it has no model of diffusers.

    Raises:
        UserError: another model of diffusers, or diffusers is not installed.
    """
    try:
        values, _ = PreTrainedConfig.get_config_dict(path)
    except (OSError, ValueError):
        return None
    name = values.get("_class_name")
    if name is None:
        return None
    if name != _CLASS:
        raise UserError(f"{path!r} has the class {name} of diffusers; expected an {_CLASS}")
    config = LatentVAEConfig(vae={key: value for key, value in values.items() if key != "_commit_hash"})
    return LatentVAE(config, _class().from_pretrained(path) if with_weights else None)


def _class() -> Any:
    try:
        from diffusers import AutoencoderKL
    except ImportError as error:
        raise UserError(f"an {_CLASS} needs diffusers ({error}); {install_command('vae')}") from None
    return AutoencoderKL
