"""A model that is too large for the machine is verified at a smaller size, and the size is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omnitrain.errors import UserError
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.discovery import discover
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.tiny_model import TinyModel, fits, needed_memory, num_parameters, tiny_model_of
from omnitrain.parallel.verify.verify import verify
from tests.families import FAMILIES
from tests.tiny import FOUNDATION, SIGLIP, tiny_model

LAYERS, ROWS = 9, 3000


def large_qwen3_vl(device: str = "meta") -> PreTrainedModel:
    config = FAMILIES["qwen3_vl"]()
    config.text_config.num_hidden_layers, config.text_config.vocab_size = LAYERS, ROWS
    config.image_token_id, config.video_token_id = ROWS - 1, ROWS - 2
    with torch.device(device):
        return foundation_class(config)(config)


def large_deepseek() -> PreTrainedModel:
    config = FAMILIES["deepseek_v3"]()
    config.n_routed_experts, config.vocab_size = 16 * config.n_group, ROWS
    with torch.device("meta"):
        return foundation_class(config)(config)


def large_any_to_any() -> OmniModel:
    tower = {"tower": {"config": SIGLIP | {"num_hidden_layers": 8}}, "projector": {"kind": "pixel_shuffle"}}
    model = tiny_model(
        foundation=FOUNDATION | {"num_hidden_layers": LAYERS, "vocab_size": ROWS}, encoders={"image_encoder": tower}
    )
    model.image_encoder.requires_grad_(False)
    return model


def hf_samples(model: PreTrainedModel) -> list[dict[str, Any]]:
    """With the token ids of ``model``."""
    probes = probe_samples(model, discover(model))
    labels = [torch.from_numpy(p.sample.input_ids).where(torch.from_numpy(p.sample.loss_mask), -100) for p in probes]
    return [probe.arguments | {"labels": label} for probe, label in zip(probes, labels, strict=True)]


def just_too_large(model: PreTrainedModel, ranks: int = 2) -> float:
    return needed_memory(num_parameters(model), ranks) - 1


def tiny_model_for(model: PreTrainedModel) -> TinyModel:
    tiny = tiny_model_of(model, 2, just_too_large(model))
    assert tiny is not None
    return tiny


def test_a_model_that_fits_is_verified_as_it_is() -> None:
    model = tiny_model()
    assert fits(model, 2, needed_memory(num_parameters(model), 2)) and not fits(model, 2, just_too_large(model))
    assert tiny_model_of(model, 2, needed_memory(num_parameters(model), 2)) is None


def test_more_ranks_need_more_memory() -> None:
    assert 4 * 10 <= needed_memory(1, 1) < needed_memory(1, 4) < needed_memory(2, 4) == 2 * needed_memory(1, 4)


def test_depth_experts_and_rows_are_cut_and_widths_stay() -> None:
    full = large_deepseek()
    small = tiny_model_for(full)()
    assert small.config.n_routed_experts == 4 * full.config.n_group and small.config.vocab_size == 512
    widths = ("hidden_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank", "num_attention_heads")
    assert [getattr(small.config, name) for name in widths] == [getattr(full.config, name) for name in widths]


def test_towers_of_an_omni_model_are_cut_and_what_is_frozen_stays_so() -> None:
    full = large_any_to_any()
    small = tiny_model_for(full)()
    assert isinstance(small, OmniModel)
    assert len(small.image_encoder.tower.encoder.layers) == 3 and len(small.foundation.model.layers) == 2
    assert small.foundation.get_input_embeddings().weight.shape == (512, FOUNDATION["hidden_size"])
    trained = {name: any(p.requires_grad for p in own.values()) for name, own in small.components.items()}
    assert not trained["image_encoder"] and trained["foundation"]


def test_special_tokens_keep_their_meaning_and_others_stay_ordinary() -> None:
    full = large_qwen3_vl()
    tiny = tiny_model_for(full)
    ids = torch.tensor([[5, ROWS - 1, 1234, ROWS - 2]])
    small = tiny.sample({"input_ids": ids, "labels": torch.tensor([[-100, -100, 1234, -100]])})
    image, video = tiny.config.image_token_id, tiny.config.video_token_id
    assert small["input_ids"][0, [0, 1, 3]].tolist() == [5, image, video] and image != video
    ordinary = int(small["input_ids"][0, 2])
    assert ordinary < 512 and ordinary not in tiny.tokens.values()
    assert small["labels"].tolist() == [[-100, -100, ordinary, -100]]


@pytest.mark.second
def test_a_model_on_meta_that_is_too_large_is_verified_smaller_and_the_size_is_printed(ranks: RankPool) -> None:
    full = large_qwen3_vl()
    samples = hf_samples(large_qwen3_vl("cpu"))
    report = verify(large_qwen3_vl, samples, ["dp2"], nproc=2, pool=ranks, memory=just_too_large(full))
    assert [row.status for row in report.rows] == ["equal"], str(report)
    assert report.parameters < num_parameters(full)
    for part in (
        f"3 of {LAYERS} layers",
        f"512 of {ROWS:,} vocabulary rows",
        f"of {num_parameters(full):,} parameters",
    ):
        assert part in " ".join(str(report).split()), str(report)


def test_a_model_that_is_too_large_even_when_cut_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"found 0\.0 GiB, expected 0\.\d GiB for its smallest size \([\d,]+ parameters\)"
    ):
        verify(large_qwen3_vl, [{}], ["dp2"], memory=1000)
