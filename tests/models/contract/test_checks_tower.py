"""Whether the rows of a tower's call may lie on several ranks."""

from __future__ import annotations

import pytest
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionBlock
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from omnitrain.models.components.contract import Contract
from omnitrain.models.contract.checks_sequence import SequenceContract, check_native_tower
from omnitrain.models.hf.load import foundation_class
from tests.families import FAMILIES


def found_of(family: str, component: str = "image_encoder") -> SequenceContract:
    config = FAMILIES[family]()
    return check_native_tower(foundation_class(config), config, Contract(), component)


@pytest.mark.parametrize(
    ("family", "component"),
    [("qwen2_5_vl", "image_encoder"), ("qwen3_vl", "image_encoder"), ("qwen2_5_omni_thinker", "audio_encoder")],
    ids=["windows", "deepstack", "sound"],
)
def test_towers_that_take_all_items_as_one_row_may_be_shared(family: str, component: str) -> None:
    assert found_of(family, component) == SequenceContract("", heads=(2,))


@pytest.mark.parametrize("family", ["gemma3", "mistral3"], ids=["images along the batch", "a row in a batch of one"])
def test_other_towers_are_refused(family: str) -> None:
    assert "do not take all items as one sequence" in found_of(family).problem


def test_a_block_that_mixes_rows_outside_of_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Qwen2_5_VLVisionBlock.forward
    monkeypatch.setattr(
        Qwen2_5_VLVisionBlock, "forward", lambda self, x, **known: own(self, x + x.mean(0), **known), raising=True
    )
    assert found_of("qwen2_5_vl").problem.startswith("features of a slice of its sequence differ by")


def test_code_between_blocks_that_reads_their_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Qwen3VLVisionModel.forward

    def forward(self: Qwen3VLVisionModel, hidden_states: Tensor, grid_thw: Tensor, **known: object) -> object:
        seen: list[Tensor] = []
        handle = self.blocks[0].register_forward_hook(lambda block, args, output: seen.append(output.mean()))
        output = own(self, hidden_states, grid_thw, **known)
        handle.remove()
        output.pooler_output = output.pooler_output + seen[0]
        return output

    monkeypatch.setattr(Qwen3VLVisionModel, "forward", forward)
    assert found_of("qwen3_vl").problem.startswith("features of a slice of its sequence differ by")
