from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from omnitrain.models.foundation.recurrent_segments import by_heads
from omnitrain.ops.attention.packed_context import PackedSequence, inside
from tests.families import FAMILIES


class HeadByHead:
    """A row that one rank has all of, whose heads are computed one after another; counts what is computed."""

    num_ranks = 2

    def __init__(self) -> None:
        self.computed: list[tuple[int, ...]] = []

    def by_heads(self, compute: Any, tensors: list[Tensor]) -> Tensor:
        half = tensors[0].size(1) // 2
        made = []
        for heads in (slice(0, half), slice(half, None)):
            made.append(compute([tensor[:, heads] for tensor in tensors], heads))
            self.computed.append(tuple(made[-1].shape))
        return torch.cat(made, dim=1)


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3_next", Qwen3NextGatedDeltaNet), ("qwen3_5", Qwen3_5GatedDeltaNet)]
)
def test_a_share_of_the_heads_over_all_samples_is_that_share_of_the_layer(family: str, kind: Any) -> None:
    torch.manual_seed(0)
    layer = kind(FAMILIES[family]().get_text_config(), 0)
    rows = torch.randn(1, 19, layer.hidden_size)
    shared, part = by_heads(kind.forward), HeadByHead()
    with inside(PackedSequence((0, 4, 19), part)):
        found = shared(layer, rows, cu_seq_lens_q=torch.tensor([0, 4, 19]))
    expected = torch.cat([layer(rows[:, :4]), layer(rows[:, 4:])], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    channels, width = layer.conv_dim // 2, layer.head_v_dim
    assert part.computed == [(19, channels, 1)] * 2 + [(19, layer.num_v_heads // 2, width)] * 2


def test_layers_without_both_kernels_are_left_alone() -> None:
    assert by_heads(Qwen3Attention.forward) is None
    assert by_heads(SimpleNamespace) is None
