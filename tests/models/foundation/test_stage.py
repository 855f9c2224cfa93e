"""Pipeline stages of HF models: the loss and all gradients of any cut are those of the whole model."""

from __future__ import annotations

from functools import lru_cache
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from omnitrain.data.packing.pack import Pack
from omnitrain.errors import UserError
from omnitrain.models.contract.cache import contract_path
from omnitrain.models.contract.stages import check_stages, stage_contract_of
from omnitrain.models.discovery.text_run import text_blocks
from omnitrain.models.foundation import stage as stage_module
from omnitrain.models.foundation.stage import BlockSpan
from omnitrain.models.omni.stage import StageInput
from tests.families import FAMILIES
from tests.models.plain import Pair, pair_of
from tests.models.shrunk import small_configs
from tests.models.staged import detached, staged_step, unequal, whole_step, with_layers
from tests.tiny import tiny_model, tiny_processor, tiny_samples

QUICK = ("qwen3_moe", "qwen3_vl_moe")
CASES = [pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow) for family in FAMILIES]
# The gradients of parameters that several stages read are summed in another order.
ROUNDED = ("gemma4", "gemma4_moe")


@lru_cache(maxsize=4)
def pair(family: str, tied: bool = False) -> Pair:
    torch.manual_seed(0)
    config = FAMILIES[family]() if family in ROUNDED else with_layers(FAMILIES[family]())
    config.tie_word_embeddings = config.get_text_config(decoder=True).tie_word_embeddings = tied
    return pair_of(config)


@pytest.mark.parametrize("family", CASES)
def test_every_legal_cut_is_bitwise(family: str) -> None:
    model, pack = pair(family).ours, pair(family).pack()
    loss, gradients = whole_step(model, [pack])
    cuts = model.stage_contract.cuts
    assert cuts == (1, 2, 3) or family in ROUNDED
    for chosen in (*((cut,) for cut in cuts), cuts):
        staged = staged_step(model, [pack], chosen)
        errors = unequal(gradients, staged[1])
        assert staged[0] == loss
        assert errors == {} or (family in ROUNDED and max(errors.values()) < 1e-5)


def test_deepstack_levels_are_read_by_the_stage_that_has_their_block() -> None:
    """A cut between the levels: each stage gets zeros for the levels and embeddings that it does not read."""
    model, pack = pair("qwen3_vl_moe").ours, pair("qwen3_vl_moe").pack()
    contract = model.stage_contract
    assert contract.levels == {"deepstack_features.0": 0, "deepstack_features.1": 1}
    assert not contract.needs_embeddings
    reads = [contract.reads(level, *span) for span in ((0, 1), (1, 4)) for level in contract.levels]
    assert reads == [True, False, False, True]
    encoded, results = detached(model.encode_media(pack))
    first = model.run_foundation(encoded, StageInput(BlockSpan(0, 1, 4)))
    assert isinstance(first, Tensor) and first.shape == (1, pack.num_tokens, 64)
    first.sum().backward()
    assert len(results) == 2 * 3  # of images and of videos: embeddings and two levels
    for features in encoded.native.values():
        grads = [tensor.grad for tensor in features.tensors()]
        assert [grad is not None and bool(grad.any()) for grad in grads] == [True, True, False]


def test_a_later_stage_has_the_same_gradients_with_images_as_without() -> None:
    """Ranks reduce them together: llama4 runs its projector over features that a later stage drops, or skips it."""
    model = pair("llama4").ours
    reached, every = [], [probe.sample for probe in pair("llama4").probes]
    for samples in (every, [sample for sample in every if not sample.spans]):
        pack = Pack.from_samples(samples)
        hidden = torch.randn(1, pack.num_tokens, 64, requires_grad=True)
        model.zero_grad(set_to_none=True)
        encoded, stage = detached(model.encode_media(pack))[0], StageInput(BlockSpan(2, 4, 4), (hidden,))
        model.run_foundation(encoded, stage).text.sum.backward()
        reached.append({name for name, parameter in model.named_parameters() if parameter.grad is not None})
    assert reached[0] == reached[1] and "foundation.multi_modal_projector.linear_1.weight" in reached[0]


def test_the_gradient_of_the_foundations_output_is_the_first_to_arrive() -> None:
    """FSDP gathers at it: ranks with images and without must do so in the same order."""
    model, order = pair("llama4").ours, []
    assert model.runner.contract.skipped_modules

    def note(name: str, tensor: Tensor) -> None:
        tensor.register_hook(lambda _: order.append(name))

    block = text_blocks(model.foundation)[-1]
    handles = [
        model.foundation.register_forward_hook(lambda _, __, output: note("output", output.logits)),
        block.register_forward_hook(lambda _, __, output: note("block", output)),
    ]
    model(pair("llama4").pack()).losses["text"].sum.backward()
    for handle in handles:
        handle.remove()
    assert order == ["output", "block"]


@pytest.mark.second
def test_tied_embeddings_get_both_gradients() -> None:
    model, packs = pair("qwen3_vl_moe", tied=True).ours, [pair("qwen3_vl_moe", tied=True).pack()]
    assert model.foundation.lm_head.weight is model.foundation.get_input_embeddings().weight
    loss, gradients = whole_step(model, packs)
    staged = staged_step(model, packs, (1, 3))
    assert staged[0] == loss and unequal(gradients, staged[1]) == {}


def test_attached_encoders_and_decoders_train_in_stages() -> None:
    model = tiny_model()
    packs = [Pack.from_samples(tiny_samples(tiny_processor(model)))]
    (count,) = {len(text_blocks(model.foundation))}
    assert model.stage_contract.cuts == tuple(range(1, count))
    loss, gradients = whole_step(model, packs)
    staged = staged_step(model, packs, model.stage_contract.cuts)
    assert staged[0] == loss and unequal(gradients, staged[1]) == {}


def test_a_stage_runs_only_its_blocks_and_leaves_the_model_as_it_was() -> None:
    model, pack = pair("qwen3_moe").ours, pair("qwen3_moe").pack()
    assert model.stage_contract.cuts  # measured here, so that no call is counted below
    blocks = text_blocks(model.foundation)
    called: list[str] = []
    names = {module: name for name, module in model.foundation.named_modules()}
    handles = [m.register_forward_pre_hook(lambda m, _: called.append(names[m])) for m in names if m is not blocks]
    before = list(blocks)
    encoded = model.encode_media(pack)
    arrived = torch.randn(1, pack.num_tokens, 64)
    model.run_foundation(encoded, StageInput(BlockSpan(1, 3, 4), (arrived,)))
    for handle in handles:
        handle.remove()
    ran = {name.removeprefix("model.layers.").split(".")[0] for name in called if name.startswith("model.layers.")}
    assert ran == {"1", "2"}
    assert not {"lm_head", "model.norm"} & set(called)
    assert list(blocks) == before and all("forward" not in vars(block) for block in blocks)


def test_a_stage_finds_its_blocks_once_and_runs_none_of_the_others() -> None:
    """Its host time does not grow with the blocks of other stages: what stands for them is made once."""
    model, pack = pair("qwen3_moe").ours, pair("qwen3_moe").pack()
    encoded, stage = model.encode_media(pack), StageInput(BlockSpan(2, 3, 4), (torch.randn(1, pack.num_tokens, 64),))
    model.run_foundation(encoded, stage)
    made: list[str] = []
    walks = [
        patch.object(nn.Module, name, lambda *_, n=name, **__: made.append(n)) for name in ("modules", "named_modules")
    ]
    with walks[0], walks[1], patch.object(stage_module, "_stand_in", wraps=stage_module._stand_in) as stand_in:
        model.run_foundation(encoded, stage)
    assert made == [] and stand_in.call_count == 1  # of the block that gets what the stage before sent


@pytest.mark.second
def test_a_cut_at_which_the_model_is_not_exact_is_refused_with_the_measurement() -> None:
    """The last layers of this model take keys and values from earlier ones."""
    model, pack = pair("gemma4").ours, pair("gemma4").pack()
    contract = model.stage_contract
    assert contract.needs_embeddings and contract.cuts and contract.refused
    cut = next(iter(contract.refused))
    with pytest.raises(UserError, match=rf"Gemma4ForConditionalGeneration cannot be cut before block {cut}: it fails"):
        model.run_foundation(model.encode_media(pack), StageInput(BlockSpan(0, cut, 5)))


def test_a_stage_contract_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    foundation, contract = pair("qwen3_moe").ours.foundation, pair("qwen3_moe").ours.runner.contract
    found = stage_contract_of(foundation, contract)
    monkeypatch.setattr("omnitrain.models.contract.stages.check_stages", lambda *_: pytest.fail("measured again"))
    assert stage_contract_of(foundation, contract) == found
    assert contract_path(type(foundation), foundation.config).with_suffix(".stages.json").exists()


def test_one_block_cannot_be_cut() -> None:
    foundation, contract = pair("qwen3_moe").ours.foundation, pair("qwen3_moe").ours.runner.contract
    found = check_stages(type(foundation), foundation.config, contract, 1)
    with pytest.raises(UserError, match="Qwen3 cannot be cut into pipeline stages: it has 1 block; set pp to 1"):
        found.require("Qwen3", 1)


@pytest.mark.second
def test_blocks_that_run_without_gradients_are_not_cut() -> None:
    """HRM runs the first turns of its recurrence without gradients, so a first stage would learn nothing."""
    config = next(small_configs("hrm_text"))
    assert config.num_layers_per_stack == 2  # as deep as it was declared, one of its tests took 90 s
    with pytest.raises(UserError, match=r"HRM cannot be cut into pipeline stages: .* runs the blocks before the cut"):
        pair_of(config).ours.stage_contract.require("HRM", 2)
