"""Families of HF models, through the public functions, against plain transformers on a copy made before."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.contract.tiny_model import init_peaked_
from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.memory.recompute import recompute_blocks
from tests.families import AUDIO_FAMILIES, FAMILIES
from tests.models.acceptance import (
    beyond_rounding,
    gradient_errors,
    pack_of_one_errors,
    packed_errors,
    unpacked_errors,
)
from tests.models.plain import Pair, our_step, pair_of, plain_logits, plain_step

QUICK = ("gpt_oss", "gemma3", "qwen2_5_omni_thinker")  # sinks; windows and images; sound, images and videos
CASES = [pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow) for family in FAMILIES]
# Its tower puts images of all sizes into one row. Plain transformers runs sdpa over that row with a block-diagonal
# mask, we run each image's rows by themselves; sdpa adds in another order where a mask leaves keys out.
ROUNDED = ("mistral3",)
VIDEO = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "ernie4_5_vl_moe", "qwen3_5", "glm4v", "llava_onevision", "gemma4")
VIDEO += tuple(AUDIO_FAMILIES)


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest) -> str:
    """Of this scope, so that all tests of a family follow each other and share its pair."""
    return request.param


@lru_cache(maxsize=len(QUICK))
def pair(family: str) -> Pair:
    return pair_of(FAMILIES[family]())


def test_samples_are_text_images_two_images_videos_and_sound(family: str) -> None:
    mixtures = {probe.modalities for probe in pair(family).probes}
    modalities = set(pair(family).ours.runner.native.interfaces)
    assert mixtures >= {(), *((modality,) for modality in modalities)}
    assert ("image", "image") in mixtures or not modalities
    assert ("video" in modalities, "audio" in modalities) == (family in VIDEO, family in AUDIO_FAMILIES)
    assert pair(family).ours.runner.contract.packs


def test_unpacked_logits_are_those_of_plain_transformers_bitwise(family: str) -> None:
    both = pair(family)
    assert unpacked_errors(both) == {}
    assert pack_of_one_errors(both) == {}
    for probe in both.probes:  # the model by itself, its attention replaced
        got, expected = (plain_logits(model, probe) for model in (both.ours.foundation, both.plain))
        if family in ROUNDED and len(probe.modalities) > 1:
            assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
        else:
            assert torch.equal(got, expected), probe.modalities


def test_packed_samples_equal_each_alone(family: str) -> None:
    assert packed_errors(pair(family)) == {}


def test_loss_and_every_gradient_of_a_pack_are_those_of_plain_transformers(family: str) -> None:
    both = pair(family)
    assert gradient_errors(both, [both.pack()]) == {}


def test_beyond_rounding_is_what_is_further_from_fp64_than_plain_transformers() -> None:
    def rest(ours: float, plain: float, exact: float) -> dict[str, float]:
        got, expected, true = ({"bias": torch.tensor([value])} for value in (ours, plain, exact))
        return beyond_rounding({"bias": 1.0}, got, expected, true)

    assert rest(ours=-5e-8, plain=4e-8, exact=1e-16) == {}
    assert rest(ours=1e-6, plain=4e-8, exact=1e-16) == {"bias": 1.0}
    assert rest(ours=1.0001, plain=1.00001, exact=1.0) == {"bias": 1.0}


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow), "qwen3_vl", "deepseek_v3"])
def test_rows_that_no_loss_reads_change_no_gradient_also_where_activations_are_recomputed(family: str) -> None:
    both = pair_of(FAMILIES[family]())
    skipped = both.ours.runner.skip_unread_rows()
    assert bool(skipped) == (family != "deepseek_v3")  # its router counts all rows
    assert gradient_errors(both, [both.pack()]) == {}
    recompute_blocks(m for m in both.ours.modules() if isinstance(m, GradientCheckpointingLayer))
    assert gradient_errors(both, [both.pack()]) == {}


def test_a_missing_sample_or_a_wrong_position_would_show() -> None:
    both = pair("qwen3_vl")
    whole = both.pack()
    assert len(gradient_errors(both, both.packs_of_one()[1:])) > 50
    shifted = Pack(**{**vars(whole), "position_ids": whole.position_ids.clamp(max=3)})
    assert len(gradient_errors(both, [shifted])) > 50


@pytest.mark.parametrize("family", ["falcon", "bloom"])
def test_a_family_that_cannot_be_packed_says_why_and_trains_unpacked(family: str) -> None:
    both = pair_of(UNPACKED[family])
    contract = both.ours.runner.contract
    assert not contract.packs
    assert "differs by" in contract.why_unpacked
    assert "computes attention in its own code, which cannot be replaced" in contract.why_unpacked
    with pytest.raises(
        UserError, match="cannot run several samples in one pack: one sample per pack: the loss of a sample"
    ):
        both.ours(both.pack())
    assert gradient_errors(both, both.packs_of_one()) == {}


def test_a_family_built_from_its_config_equals_plain_transformers() -> None:
    config = FAMILIES["smolvlm"]()
    reference = pair_of(config)
    ours = build_omni_model(foundation=config).train()
    init_peaked_(ours.foundation)
    built = Pair(reference.plain, ours, reference.probes)
    assert gradient_errors(built, [built.pack()]) == {}


def test_rows_put_into_a_frozen_foundation_get_the_gradient_of_plain_transformers() -> None:
    both = pair_of(FAMILIES["qwen3"]())
    both.ours.foundation.requires_grad_(False)
    pack = both.packs_of_one()[2]
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    positions = torch.arange(2, 6)
    both.ours.runner.text_loss(EncodedPack(pack, inserted=[(positions, rows)]))[0].sum.backward()

    embeds = both.plain.get_input_embeddings()(pack.input_ids).detach()
    plain_rows = rows.detach().clone().requires_grad_()
    embeds = embeds.index_copy(1, positions, plain_rows[None])
    logits = both.plain(inputs_embeds=embeds, use_cache=False).logits[0, pack.text_rows]
    torch.nn.functional.cross_entropy(logits, pack.text_labels, reduction="sum").backward()
    torch.testing.assert_close(rows.grad, plain_rows.grad, rtol=1e-5, atol=1e-6)
    assert all(parameter.grad is None for parameter in both.ours.parameters())


def test_training_leaves_no_trace_in_the_foundation() -> None:
    both = pair_of(FAMILIES["qwen3_vl"]())
    before = copy.deepcopy(both.ours.foundation.state_dict())
    our_step(both, [both.pack()])
    after = both.ours.foundation.state_dict()
    assert after.keys() == before.keys() == both.plain.state_dict().keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    last = both.probes[-1]
    assert torch.equal(plain_logits(both.ours.foundation, last), plain_logits(both.plain, last))
    assert plain_step(both, [0])[0] > 0


def _tiny(model_type: str, **values: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, vocab_size=200, hidden_size=64, **values)


UNPACKED = {
    "falcon": _tiny("falcon", num_hidden_layers=2, num_attention_heads=4, alibi=True),
    "bloom": _tiny("bloom", n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
}
