"""Each check notices when what it guards is broken, and what it falls back to is exact."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaForCausalLM,
    RoFormerConfig,
    RoFormerForCausalLM,
)

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import MediaItem, MediaSpan
from omnitrain.errors import UserError
from omnitrain.models.components.contract import Contract
from omnitrain.models.contract import check
from omnitrain.models.contract.check import check_contract
from omnitrain.models.contract.tiny_model import init_peaked_, tiny_config
from omnitrain.models.discovery import MediaFeatures, discover
from omnitrain.models.foundation.runner import FoundationRunner
from omnitrain.models.hf.load import foundation_class
from omnitrain.ops.attention import entry
from omnitrain.ops.attention.packed_context import PackedSequence
from omnitrain.ops.attention.spec import plain_spec
from omnitrain.ops.recompute import recompute_contexts
from tests.families import FAMILIES
from tests.models.acceptance import unpacked_errors
from tests.models.contract import broken
from tests.models.plain import pair_of


def checked(model_class: type[PreTrainedModel], family: str = "qwen3") -> Contract:
    return check_contract(model_class, FAMILIES[family]())


def facts(contract: Contract, check: str) -> str:
    return "; ".join(f"{f.outcome}: {f.fact}" for f in contract.findings if f.check == check)


def test_a_sound_model_passes_every_check() -> None:
    contract = checked(foundation_class(FAMILIES["qwen3"]()))
    assert [finding.outcome for finding in contract.findings] == ["passed"] * 6
    assert contract == Contract(findings=contract.findings, tokenwise=contract.tokenwise, without_tails=True)
    assert "bit for bit" in facts(contract, "attention")


def test_modules_behind_the_last_mixing_of_rows_are_found() -> None:
    contract = checked(foundation_class(FAMILIES["qwen3"]()))
    layer = "model.layers.-1"
    attention = [f"{layer}.self_attn.{name}" for name in ("q_proj", "o_proj", "q_norm")]
    assert set(contract.tokenwise) == {*attention, f"{layer}.mlp", f"{layer}.post_attention_layernorm", "model.norm"}


def test_where_rows_mix_at_the_end_only_what_follows_is_tokenwise() -> None:
    contract = checked(broken.MixingAtTheEnd)
    assert contract.tokenwise == ("model.norm.1",)


def test_a_model_with_experts_computes_all_rows() -> None:
    config = FAMILIES["qwen3_vl_moe"]()
    contract = check_contract(foundation_class(config), config)
    assert contract.tokenwise == () and not contract.without_tails


def test_a_model_that_looks_ahead_is_given_whole_samples() -> None:
    assert not checked(broken.LookingAhead).without_tails


def test_a_module_wrongly_taken_for_tokenwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ("model.layers.-1.self_attn.k_proj",)
    monkeypatch.setattr("omnitrain.models.contract.check.tokenwise_modules", lambda trial: wrong)
    contract = checked(foundation_class(FAMILIES["qwen3"]()))
    assert contract.tokenwise == () and not contract.without_tails
    assert all("all tokens are computed" in facts(contract, check) for check in ("unread tokens", "tails"))
    assert facts(contract, "gradients").startswith("passed")


def test_a_capped_head_gets_the_plain_loss() -> None:
    contract = checked(broken.Capped)
    assert contract.head == "plain"
    assert "logits are transformed after the head" in facts(contract, "head")
    assert facts(contract, "gradients").startswith("passed")


def test_attention_that_ignores_its_mask_is_named_and_runs_sample_by_sample() -> None:
    contract = checked(broken.MaskIgnored)
    assert contract.segmented == ("BlindAttention",) and contract.packs
    assert "BlindAttention run sample by sample" in facts(contract, "packing")


def test_a_layer_that_leaks_is_named_and_runs_sample_by_sample() -> None:
    contract = checked(broken.Leaking)
    assert contract.segmented == ("Smear",) and contract.packs
    assert facts(contract, "gradients").startswith("passed")


@pytest.mark.parametrize("model_class", [broken.LeakingOutsideOfModules, broken.CountingPlaces])
def test_a_leak_that_no_module_can_be_blamed_for_leaves_one_sample_per_pack(model_class: type) -> None:
    contract = checked(model_class)
    assert not contract.packs and contract.segmented == ()
    assert "one sample per pack: the loss of a sample of 11 tokens (text) differs by" in contract.why_unpacked
    assert facts(contract, "gradients").startswith("passed")


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3"])
def test_a_mask_spec_that_loses_windows_or_image_blocks_is_noticed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "describe", lambda function, offsets, *_: plain_spec(offsets, True, None))
    contract = checked(foundation_class(FAMILIES[family]()), family)
    assert not contract.packs or contract.segmented
    assert facts(contract, "packing").startswith("fallback")


def test_side_features_that_the_model_does_not_read_are_refused() -> None:
    contract = checked(broken.WithoutDeepstack, "qwen3_vl")
    assert "image: the model does not read deepstack_features.0, deepstack_features.1" in facts(
        contract, "side features"
    )
    assert contract.refusals


def test_a_tower_that_mixes_images_encodes_one_sample_at_a_time() -> None:
    contract = checked(broken.MixingImages, "llava")
    assert contract.by_sample == ("image",) and contract.packs
    assert facts(contract, "packing") == "passed: packed samples give the same losses as single ones"
    assert facts(contract, "gradients").startswith("passed")


@pytest.mark.second
def test_images_in_one_strip_are_encoded_item_by_item_and_so_can_be_packed() -> None:
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "minicpmv4_6",
        text_config=FAMILIES["qwen3"]().to_dict(),
        vision_config=tower | {"image_size": 448, "patch_size": 14},
        image_token_id=190,
        video_token_id=191,
    )
    assert facts(check_contract(foundation_class(config), config), "packing").startswith("passed")
    both = pair_of(config)
    assert not both.ours.runner.native.interfaces["image"].items_stack
    image = next(probe.sample for probe in both.probes if probe.modalities == ("image",))
    with torch.no_grad():
        one, two = (both.ours(Pack.from_samples([image] * number)).losses["text"].sum for number in (1, 2))
    torch.testing.assert_close(two, 2 * one, rtol=1e-5, atol=0)


def test_positions_of_a_model_that_looks_them_up_begin_where_its_own_do() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "roberta", **sizes, vocab_size=200, max_position_embeddings=64, pad_token_id=1, is_decoder=True
    )
    model = RobertaForCausalLM(config)
    with torch.device("meta"):
        empty = RobertaForCausalLM(config)
    assert [discover(each).positions.start for each in (model, empty)] == [2, 2]  # after that of padding
    contract = check_contract(RobertaForCausalLM, config)
    assert contract.packs and not contract.refusals


def test_images_that_no_feature_method_makes_rows_of_are_read_by_the_models_own_forward() -> None:
    fact = facts(checked(broken.CrossAttending), "modality image")
    assert fact.startswith("fallback: read by the model's own forward, one sample per pack: ")
    assert fact.endswith("its forward takes pixel_values, but it has no get_image_features to compute features")


def test_parameters_that_never_get_a_gradient_are_listed_by_name() -> None:
    fact = facts(checked(broken.WithSpareParts), "unused parameters")
    assert fact == "passed: 2 of the tiny model never get a gradient: spare.weight, spare.bias"


def test_a_model_whose_forward_fails_is_refused_with_its_own_words() -> None:
    contract = checked(broken.Refusing)
    assert "text: ValueError: rows must be a multiple of 128" in contract.refusals[0].fact


def test_a_loss_of_the_router_that_transformers_would_add_is_said_to_be_left_out() -> None:
    config = FAMILIES["qwen3_moe"]()
    config.router_aux_loss_coef = 0.02
    silent, asking = (check_contract(foundation_class(config), _asking(config, flag)) for flag in (False, True))
    for contract, when in ((silent, " where output_router_logits is set"), (asking, "")):
        (left_out,) = [finding for finding in contract.findings if finding.outcome == "left out"]
        added, tokens = map(float, re.findall(r"adds (\S+) to a sample's loss of (\S+?)(?: |$)", left_out.fact)[0])
        assert left_out.fact.split(f"{tokens:.2f}")[1].startswith(f"{when} (router_aux_loss_coef 0.02)")
        assert 0.02 <= added < 0.02 * config.num_experts
    config.router_aux_loss_coef = 0.0
    assert "own loss" not in {finding.check for finding in check_contract(foundation_class(config), config).findings}


def _asking(config: PreTrainedConfig, flag: bool) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    config.output_router_logits = flag
    return config


def test_a_model_that_ties_its_mlps_to_another_width_is_checked_with_wide_ones() -> None:
    config = FAMILIES["qwen3"]()
    config.hidden_size, config.intermediate_size = 128, 512
    contract = check_contract(broken.TiedWidths, config)
    assert contract.findings and {finding.outcome for finding in contract.findings} == {"passed"}
    with pytest.raises(ValueError, match="four times the hidden width"):
        broken.TiedWidths(tiny_config(config))


def _out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("8 GiB")


def _assertion_of_our_own(*_: object) -> None:
    MediaFeatures.cat([])


@pytest.mark.parametrize("failing", [_out_of_memory, _assertion_of_our_own])
def test_a_failure_of_the_check_itself_is_not_taken_for_one_of_the_model(
    failing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "packing_fact", failing)
    with pytest.raises((torch.OutOfMemoryError, AssertionError)):
        checked(foundation_class(FAMILIES["qwen3"]()))


def test_an_assertion_of_the_model_is_a_fact_with_its_place() -> None:
    contract = checked(broken.Asserting)
    assert re.search(r"text: AssertionError: rows come in pairs \(broken.py:\d+\)", contract.refusals[0].fact)


def test_random_draws_in_training_are_off_in_the_check() -> None:
    config = FAMILIES["llava"]()
    config.text_config.attention_dropout = 0.5
    config.vision_config.attention_dropout = 0.5
    assert check_contract(foundation_class(config), config).refusals == ()


@pytest.mark.parametrize("surplus", [1, -1])
def test_an_audio_row_too_many_or_too_few_names_the_sample(surplus: int) -> None:
    both = pair_of(FAMILIES["qwen2_5_omni_thinker"]())
    sample = next(probe.sample for probe in both.probes if probe.modalities == ("audio",))
    (span,) = sample.spans
    kept = span.positions[:-1] if surplus == 1 else [*span.positions, span.positions[-1] + 1]
    item = MediaItem(span.item.features, len(kept))
    cut = MediaSpan(span.component, span.start, item, is_target=False, scattered=torch.tensor(kept).numpy())
    pack = Pack.from_samples([dataclasses.replace(sample, id="clips.jsonl:7", spans=(cut,))])
    rows = len(span.positions)
    message = rf"sample clips.jsonl:7: {rows - surplus} audio placeholders, {rows} features"
    with pytest.raises(UserError, match=message):
        both.ours(pack)


def test_a_module_that_holds_layers_does_not_run_sample_by_sample() -> None:
    """Ranks would call the layers, which FSDP gathers, as often as they have samples."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    contract = check_contract(RoFormerForCausalLM, RoFormerConfig(**sizes, vocab_size=96, is_decoder=True))
    assert contract.segmented == () and not contract.packs
    assert "first in RoFormerEncoder" in contract.why_unpacked


def test_segmented_modules_are_exact_and_refuse_to_be_recomputed_as_one_sample() -> None:
    plain = broken.MaskIgnored(FAMILIES["qwen3"]()).train()
    init_peaked_(plain)
    runner = FoundationRunner(copy.deepcopy(plain), Contract(segmented=("BlindAttention",)))
    ids = torch.arange(20, 31)[None]
    arguments = {"position_ids": torch.cat([torch.arange(5), torch.arange(6)])[None], "use_cache": False}

    def run() -> torch.Tensor:
        return runner.run(ids, head=_plain_head, arguments=arguments, packed=PackedSequence((0, 5, 11))).logits

    apart = [plain(input_ids=part, use_cache=False).logits[0] for part in (ids[:, :5], ids[:, 5:])]
    torch.testing.assert_close(run()[0], torch.cat(apart), rtol=1e-5, atol=1e-5)
    runner.model.gradient_checkpointing_enable()
    with pytest.raises(UserError, match=r"BlindAttention is recomputed outside of packed"):
        run().sum().backward()
    runner.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_contexts})
    run().sum().backward()


def _plain_head(hidden: torch.Tensor, lm_head: torch.nn.Module) -> torch.Tensor:
    return type(lm_head).forward(lm_head, hidden)


def test_what_a_model_raises_in_any_check_refuses_it_in_words() -> None:
    contract = checked(broken.TrainingAlone, "llava")
    (refusal,) = contract.refusals
    assert refusal.check == "modalities"
    assert refusal.fact.startswith("RuntimeError: split_sizes must sum exactly to the number of features (broken.py:")


def test_a_module_whose_weight_another_reads_is_found() -> None:
    assert checked(broken.ReadFromOutside).read_outside == ("model.layers.*.mlp.up_proj",)


def test_images_whose_sizes_do_not_agree_with_their_tiles_are_left_to_the_models_own_forward() -> None:
    config = FAMILIES["llava_onevision"]()
    config.image_grid_pinpoints = [[24, 24]]  # no multiple of the tower's 16 pixels
    both = pair_of(config)
    assert "RuntimeError: split_with_sizes" in both.ours.runner.native.in_forward["image"]
    assert unpacked_errors(both) == {}
