"""Whether the tokens of a row may lie on several ranks."""

from __future__ import annotations

import pytest

from omnitrain.models.components.contract import Contract
from omnitrain.models.contract.check import contract_of
from omnitrain.models.contract.checks_sequence import SequenceContract, check_sequence, sequence_contract_of
from omnitrain.models.hf.load import foundation_class
from tests.families import FAMILIES
from tests.models.contract import broken


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next", "qwen3_omni_moe_thinker"])
def test_sequences_of_sound_models_may_be_shared(family: str) -> None:
    config = FAMILIES[family]()
    model = foundation_class(config)(config)
    assert sequence_contract_of(model, contract_of(model)) == SequenceContract("", heads=(4,))


@pytest.mark.parametrize("model_class", [broken.CountingPlaces, broken.Leaking, broken.MaskIgnored, broken.Undefined])
def test_a_model_that_counts_its_tokens_or_mixes_them_outside_of_attention_is_found(model_class: type) -> None:
    found = check_sequence(model_class, FAMILIES["qwen3"](), Contract())
    assert found.problem.startswith("logits of a slice differ by")


def test_layers_that_run_sample_by_sample_see_the_whole_row() -> None:
    found = check_sequence(broken.MaskIgnored, FAMILIES["qwen3"](), Contract(segmented=("BlindAttention",)))
    assert found == SequenceContract()


def test_a_model_with_an_attention_of_its_own_keeps_its_sequences_on_one_rank() -> None:
    found = check_sequence(broken.MaskIgnored, FAMILIES["qwen3"](), Contract(attention="native", packs=False))
    assert "its own attention" in found.problem
