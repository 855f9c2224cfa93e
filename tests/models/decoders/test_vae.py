"""Latents of diffusers' VAE; `make test-vae` installs diffusers for these."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import to_tensors
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from tests.tiny import FOUNDATION, tiny_processor, tiny_samples

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny VAE as diffusers saves it."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    sizes = {"block_out_channels": [8, 8], "norm_num_groups": 4, "latent_channels": 3, "sample_size": 8}
    path = tmp_path_factory.mktemp("vae")
    AutoencoderKL(**blocks, **sizes, scaling_factor=0.5, shift_factor=0.25).save_pretrained(path)
    return path


def built(folder: Path, **settings: object) -> OmniModel:
    decoder = {"tokenizer": str(folder), "image_size": 8, **settings}
    return build_omni_model(foundation=FOUNDATION, decoders={"image_decoder": decoder})


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))


@pytest.mark.parametrize("patch_size", [1, 2])
def test_latents_and_images_are_those_of_diffusers(folder: Path, patch_size: int) -> None:
    from diffusers import AutoencoderKL

    plain = AutoencoderKL.from_pretrained(folder).eval()
    decoder = built(folder, flow={"patch_size": patch_size}).image_decoder.eval()
    features, num_tokens = decoder.adapter().prepare("image", picture())
    assert num_tokens == (4 // patch_size) ** 2
    with torch.no_grad():
        found = decoder.codec.encode(to_tensors(features))
        pixels = torch.from_numpy(features["pixel_values"])
        expected = (plain.encode(pixels).latent_dist.mode() - 0.25) * 0.5
        decoded = plain.decode(expected / 0.5 + 0.25).sample[0]
    assert found.shape == (num_tokens, 3 * patch_size**2)
    torch.testing.assert_close(found.sum(), expected.sum())
    written = np.asarray(decoder.lm_generate(found.tolist()), dtype=int)
    values = ((decoded.clamp(-1, 1) + 1) * 127.5).round().permute(1, 2, 0).int().numpy()
    assert np.abs(written - values).max() <= 1


@pytest.mark.parametrize("kind", ["head", "in_context"])
def test_a_model_with_a_vae_trains_and_keeps_it_when_saved(folder: Path, tmp_path: Path, kind: str) -> None:
    model = built(folder, flow={"kind": kind}).train()
    pack = Pack.from_samples(tiny_samples(tiny_processor(model), 2, ("text_to_image", "text")))
    loss = model(pack).loss
    loss.backward()
    vae = dict(model.image_decoder.tokenizer.named_parameters())
    assert vae and all(weight.grad is None for weight in vae.values()) and not model.image_decoder.tokenizer.training
    model.save_pretrained(tmp_path)
    loaded = build_omni_model(weights_path=tmp_path)
    assert all(vae[name].equal(weight) for name, weight in loaded.image_decoder.tokenizer.named_parameters())
    assert loaded(pack).loss.item() == loss.item()


def test_a_vae_without_a_scale_is_refused(folder: Path) -> None:
    config = {"model_type": "omnitrain_vae", "vae": {"latent_channels": 4, "scaling_factor": None}}
    with pytest.raises(UserError, match="`scaling_factor` of its config: found None; expected 1 / the standard dev"):
        build_omni_model(foundation=FOUNDATION, decoders={"own": {"tokenizer": {"config": config}, "image_size": 8}})


def test_a_vae_that_scales_each_channel_is_refused(folder: Path) -> None:
    scales = {"latents_mean": [0.0], "latents_std": [1.0]}
    config = {"model_type": "omnitrain_vae", "vae": {"latent_channels": 1, "scaling_factor": 0.5, **scales}}
    with pytest.raises(UserError, match=r"its config scales each channel \(latents_mean, latents_std\), which has no"):
        build_omni_model(foundation=FOUNDATION, decoders={"own": {"tokenizer": {"config": config}, "image_size": 8}})


def test_latents_are_features_of_an_encoder_that_is_saved_and_loaded(folder: Path, tmp_path: Path) -> None:
    spec = {"tower": str(folder), "processor": {"size": {"height": 8, "width": 8}}, "projector": {"kind": "linear"}}
    model = build_omni_model(foundation=FOUNDATION, encoders={"image_encoder": spec}).eval()
    features, num_tokens = model.image_encoder.adapter().prepare("image", picture())
    given = to_tensors(features)
    with torch.no_grad():
        rows = model.image_encoder.lm_tower(given, (num_tokens,))["main"]
        expected = built(folder).image_decoder.eval().codec.encode(given)
        assert num_tokens == 16
        torch.testing.assert_close(rows, expected)
        model.save_pretrained(tmp_path)
        loaded = build_omni_model(weights_path=tmp_path).image_encoder
        assert torch.equal(loaded.lm_tower(given, (num_tokens,))["main"], rows)
