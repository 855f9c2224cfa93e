from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omnitrain.models.foundation.encoded_pack import EncodedPack
from omnitrain.models.foundation.sequence_slice import cut_pack, local_positions
from omnitrain.models.omni.encode import filled_up
from omnitrain.plan.sequence import split_sequence
from tests.parallel.factories import any_to_any
from tests.parallel.laid_out import pack


@pytest.mark.parametrize("cp", [1, 2])
def test_the_parts_of_a_pack_are_the_pack(cp: int) -> None:
    """Each token and each label on one rank, in order."""
    whole = pack()
    found = {}
    for rows in map(torch.from_numpy, split_sequence(whole.num_tokens, sp=3, cp=cp).positions):
        own = cut_pack(whole, part(rows))
        assert torch.equal(own.input_ids[0], whole.input_ids[0, rows])
        assert torch.equal(own.position_ids[0], whole.position_ids[0, rows])
        found |= dict(zip(rows[own.text_rows].tolist(), own.text_labels.tolist(), strict=True))
        assert own.num_tokens == len(rows) and own.info == whole.info
    assert found == dict(zip(whole.text_rows.tolist(), whole.text_labels.tolist(), strict=True))


def test_tokens_are_found_in_any_order_and_not_where_they_are_not() -> None:
    index, rows = local_positions(part(torch.tensor([2, 3, 7])), torch.tensor([9, 7, 0, 2, 4]))
    assert index.tolist() == [1, 3] and rows.tolist() == [2, 0]


def test_a_row_is_filled_up_with_a_sample_of_its_own() -> None:
    text = pack("text")
    own: Any = SimpleNamespace(num_tokens=text.num_tokens + 3)
    longer = filled_up(any_to_any(), EncodedPack(text, sequence_slice=own)).pack
    assert longer.info.lengths == (*text.info.lengths, 3) and longer.cu_seqlens.tolist()[-1] == longer.num_tokens
    assert torch.equal(longer.text_rows, text.text_rows)


def part(rows: torch.Tensor) -> Any:
    return SimpleNamespace(positions=rows, host_positions=rows)
