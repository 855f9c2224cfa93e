from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from omnitrain.data.sources.media import Waveform
from omnitrain.errors import UserError
from omnitrain.models.components.protocols import to_tensors
from omnitrain.models.encoders.towers import merge_frames, merge_grid, tower_from_source
from omnitrain.models.hf.load import resolve
from omnitrain.models.hf.stored_values import FILES
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.verify import verify
from tests.tiny import EXTRACTOR, FOUNDATION, SIGLIP, WHISPER, tiny_processor, tiny_samples

VIT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
QWEN = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
}
TOWERS = {
    "siglip": SIGLIP,
    "clip": {"model_type": "clip_vision_model", "patch_size": 2, **VIT},
    "dinov2": {"model_type": "dinov2", "patch_size": 2, "mlp_ratio": 2}
    | {k: v for k, v in VIT.items() if k != "intermediate_size"},
    "whole clip": {"model_type": "clip", "vision_config": {"patch_size": 2, **VIT}},
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl_vision",
        "out_hidden_size": 24,
        "window_size": 8,
        "fullatt_block_indexes": [0],
        **QWEN,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl_vision",
        "out_hidden_size": 24,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
        **QWEN,
    },
}
GRID_PROCESSOR = {"size": {"shortest_edge": 16, "longest_edge": 256}}


def encoder(tower: dict, kind: str = "mlp", processor: dict | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    spec = {"tower": {"config": tower}, "projector": {"kind": kind}, "processor": processor}
    return build_omni_model(foundation=FOUNDATION, encoders={"encoder": spec}).encoders["encoder"].eval()


def picture(seed: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("name", TOWERS)
@torch.no_grad()
def test_any_vision_tower_reads_images_and_videos_in_one_call(name: str) -> None:
    takes_grid = name.startswith("qwen")
    model = encoder(TOWERS[name], processor=GRID_PROCESSOR if takes_grid else None)
    adapter = model.adapter()
    video = [picture(1), picture(2), picture(3)]
    media = [("image", picture(0)), ("video", video), ("image", picture(4, (16, 8)))]
    prepared = [adapter.prepare(modality, item) for modality, item in media]
    joined = {k: np.concatenate([features[k] for features, _ in prepared]) for k in prepared[0][0]}
    together = model.lm_encode(to_tensors(joined), tuple(rows for _, rows in prepared))
    assert together.shape == (sum(rows for _, rows in prepared), 32)
    alone = torch.cat([model.lm_encode(to_tensors(features), (rows,)) for features, rows in prepared])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def joined(*more: dict, kind: str = "mlp", tower: dict = SIGLIP, **keys: Any) -> OmniModel:
    spec = {"tower": {"config": tower}, "more_towers": [{"config": one} for one in more], "projector": {"kind": kind}}
    torch.manual_seed(0)
    return build_omni_model(foundation=FOUNDATION, encoders={"image_encoder": spec | keys})


@torch.no_grad()
def test_joined_towers_give_each_patch_the_features_of_all_of_them(tmp_path: Path) -> None:
    whole = joined(TOWERS["dinov2"], TOWERS["clip"], kind="pixel_shuffle")
    model = whole.image_encoder
    adapter = model.adapter()
    features, num_tokens = adapter.prepare("video", [picture(1), picture(2)])
    names = {name for name in features if name.startswith("pixel")}
    assert names == {"pixel_values", "pixel_values_1", "pixel_values_2"}
    assert {features[name].shape for name in names} == {(2, 3, 8, 8)}
    given = to_tensors(features | {"pixel_values_1": 2 * features["pixel_values_1"]})
    rows = model.lm_tower(given, (num_tokens,))["main"]
    siglip, dino, clip = model.tower.towers
    by_hand = [
        siglip(pixel_values=given["pixel_values"]).last_hidden_state,
        dino(pixel_values=given["pixel_values_1"]).last_hidden_state[:, 1:],
        clip(pixel_values=given["pixel_values_2"]).last_hidden_state[:, 1:],
    ]
    expected = merge_grid(torch.cat(by_hand, dim=-1).unflatten(1, (4, 4)), 2).flatten(0, 1)
    assert rows.shape == (num_tokens, 4 * 3 * 16)
    torch.testing.assert_close(rows, expected)
    whole.save_pretrained(tmp_path)
    again = OmniModel.from_pretrained(tmp_path).image_encoder
    assert torch.equal(again.lm_encode(given, (num_tokens,)), model.lm_encode(given, (num_tokens,)))


def test_joined_towers_that_do_not_fit_are_refused_in_words() -> None:
    with pytest.raises(UserError, match=r"dinov2 gives 2 x 2 patches, and siglip_vision_model 4 x 4; only as many"):
        joined(TOWERS["dinov2"] | {"patch_size": 4}).image_encoder.minimal_input()
    with pytest.raises(UserError, match=r"image_encoder.more_towers: only vision towers can be joined, and `tower`"):
        joined(SIGLIP, tower=WHISPER, processor=EXTRACTOR)
    with pytest.raises(UserError, match=r"more_towers.0: WhisperEncoder reads no images of one size; expected a tower"):
        joined(WHISPER)
    with pytest.raises(UserError, match=r"more_towers.0: Qwen2_5_VisionTransformerPretrainedModel reads no images of"):
        joined(TOWERS["qwen2_5_vl"])


@torch.no_grad()
def test_latents_are_features_of_a_tower() -> None:
    patches = {"model_type": "omnitrain_patches", "patch_size": 4}
    size = {"size": {"height": 8, "width": 8}}
    model = joined(tower=patches, kind="linear", processor=size).image_encoder
    features, num_tokens = model.adapter().prepare("image", picture(0))
    rows = model.lm_tower(to_tensors(features), (num_tokens,))["main"]
    pixels = torch.from_numpy(features["pixel_values"])
    assert (num_tokens, pixels.min() < -0.9, pixels.max() > 0.9) == (4, True, True)
    corner = pixels[0, :, :4, 4:].reshape(-1)
    torch.testing.assert_close(rows[1], corner)
    with pytest.raises(UserError, match=r"PatchCodec takes images of any size; set the one that it gets: `processor:"):
        joined(tower=patches)


LAYOUTS = ["dp2.world", "tp2", "pp2", "vision1+dp1", "dp2.bf16"]


@pytest.mark.slow
def test_joined_towers_train_as_in_one_process_on_any_ranks(ranks: RankPool) -> None:
    samples = tiny_samples(tiny_processor(joined(TOWERS["dinov2"])), 4, ("image_to_text", "text"))
    report = verify(partial(joined, TOWERS["dinov2"]), samples, LAYOUTS, nproc=2, timeout_s=120, pool=ranks)
    assert report.ok, str(report)


def test_limits_of_pixels_are_keys_of_an_encoder() -> None:
    def grids(**keys: Any) -> list[int]:
        spec = {
            "tower": {"config": TOWERS["qwen2_5_vl"]},
            "processor": GRID_PROCESSOR,
            "projector": {"kind": "mlp"},
            **keys,
        }
        adapter = build_omni_model(foundation=FOUNDATION, encoders={"eye": spec}).encoders["eye"].adapter()
        sizes = ((8, 8), (64, 64))
        return [int(adapter.prepare("image", picture(0, size))[0]["image_grid_thw"].prod()) for size in sizes]

    patch = QWEN["patch_size"] ** 2
    assert [patches * patch for patches in grids()] == [64, 256]
    assert [patches * patch for patches in grids(max_pixels=64)] == [64, 64]
    assert [patches * patch for patches in grids(min_pixels=256, max_pixels=1024)] == [256, 1024]
    with pytest.raises(UserError, match=r"model\.encoders\.eye\.max_pixels: SiglipImageProcessorPil does not choose"):
        spec = {"tower": {"config": TOWERS["siglip"]}, "max_pixels": 64}
        build_omni_model(foundation=FOUNDATION, encoders={"eye": spec})


@torch.no_grad()
def test_the_order_of_frames_shows_in_their_rows() -> None:
    model = encoder(SIGLIP)
    frames = [picture(1), picture(1)]
    features, rows = model.adapter().prepare("video", frames)
    first, second = model.lm_encode(to_tensors(features), (rows,)).chunk(2)
    still, _ = model.adapter().prepare("image", picture(1))
    assert not torch.allclose(first, second)
    difference = second - first
    torch.testing.assert_close(difference, difference[:1].expand_as(difference))
    assert not torch.allclose(first, model.lm_encode(to_tensors(still), (rows // 2,)))


def test_pixel_shuffle_keeps_neighbours_together() -> None:
    grid = torch.arange(16.0).view(1, 4, 4, 1)
    assert merge_grid(grid, 2)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert merge_frames(torch.arange(1.0, 4.0).view(1, 3, 1), 2)[0].tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize("kind", ["linear", "mlp", "pixel_shuffle"])
def test_every_projector_trains_and_takes_part_without_data(kind: str) -> None:
    for tower, processor in ((SIGLIP, None), (WHISPER, EXTRACTOR)):
        model = encoder(tower, kind, processor)
        features, rows = model.minimal_input()
        model.lm_encode(features, rows).sum().backward()
        missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert missing == []


@pytest.mark.parametrize("seconds", [0.05, 0.5, 1.0, 1.01, 3.3])
@torch.no_grad()
def test_clips_of_any_length_make_the_declared_rows(seconds: float) -> None:
    model = encoder(WHISPER, "pixel_shuffle", EXTRACTOR)
    samples = np.random.default_rng(0).normal(size=int(16000 * seconds)).astype(np.float32)
    features, rows = model.adapter().prepare("audio", Waveform(samples, 16000))
    assert features["input_features"].shape == (int(np.ceil(seconds)), 16, 50)
    assert model.lm_encode(to_tensors(features), (rows,)).shape == (rows, 32)
    assert abs(rows - seconds * 12.5) <= 2 * np.ceil(seconds)  # 50 frames/s, halved by the tower, halved by the merge


def test_rows_that_do_not_match_their_placeholders_are_an_error() -> None:
    for tower, processor in ((SIGLIP, None), (WHISPER, EXTRACTOR)):
        model = encoder(tower, "mlp", processor)
        features, (rows,) = model.minimal_input()
        for wrong in (rows - 1, rows + 1):
            with pytest.raises((ValueError, RuntimeError), match=f"{wrong} placeholders"):
                model.lm_encode(features, (wrong,))


def test_towers_that_do_not_fit_are_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"use projector\.kind: linear or mlp"):
        encoder(TOWERS["qwen2_5_vl"], "pixel_shuffle", GRID_PROCESSOR)
    with pytest.raises(UserError, match="neither a vision nor an audio tower"):
        encoder(FOUNDATION)
    deep = encoder({**TOWERS["qwen3_vl"], "deepstack_visual_indexes": [0]}, processor=GRID_PROCESSOR)
    with pytest.raises(UserError, match="set `deepstack_visual_indexes"):
        deep.lm_encode(*deep.minimal_input())


def test_of_a_model_around_a_tower_nothing_is_read(tmp_path: Path) -> None:
    text = {name: size for name, size in VIT.items() if name != "image_size"} | {"vocab_size": 64}
    whole = resolve(TOWERS["whole clip"] | {"text_config": text})
    whole.save_pretrained(tmp_path)
    before = FILES.num_bytes
    tower = tower_from_source(str(tmp_path), "image", torch.float32)
    assert FILES.num_bytes - before == sum(parameter.nbytes for parameter in tower.parameters())
    expected = dict(whole.get_encoder("image").named_parameters())
    for name, parameter in tower.named_parameters():
        assert type(parameter) is nn.Parameter and torch.equal(parameter, expected[name])
