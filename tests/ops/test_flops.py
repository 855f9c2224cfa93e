from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from omnitrain.ops.experts.grouped_mm import grouped_linear
from omnitrain.ops.flops import Attention, Flops, Passes, Recomputed, count, without_content


def test_a_causal_mask_keeps_the_lower_half_and_a_window_a_band() -> None:
    def kept(length: int, **mask: int) -> int:
        return Attention(1, 2, True, **mask).pairs(length)

    assert [kept(length) for length in (1, 2, 5)] == [1, 3, 15]
    assert [kept(length, window=3) for length in (1, 2, 3, 5)] == [1, 3, 6, 1 + 2 + 3 + 3 + 3]
    assert Attention(1, 2, False).pairs(5) == 25
    passes = Attention(10, 20, True).of([2, 5])
    assert passes == Passes(Flops(0, 10 * 18, 10 * 29), Flops(0, 20 * 18, 20 * 29))


def test_a_frozen_matrix_has_no_gradient_and_its_input_only_where_something_before_trains() -> None:
    def passes(*trained: bool) -> Passes:
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
        for layer, trains in zip(model, trained, strict=True):
            layer.requires_grad_(trains)
        empty = without_content(model)
        return count(lambda: [empty(torch.ones(3, 4))], empty).passes

    first, second = 2 * 3 * 4 * 8, 2 * 3 * 8 * 2
    forward = Flops(first + second)
    assert passes(True, True) == Passes(forward, Flops(first + 2 * second))  # data need no gradient
    assert passes(False, True) == Passes(forward, Flops(second))
    assert passes(True, False) == Passes(forward, Flops(first + second))
    assert passes(False, False) == Passes(forward)


def test_the_weights_of_a_model_without_content_take_no_memory_and_the_model_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    empty = without_content(model)
    count(lambda: [empty(torch.ones(3, 4))], empty)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    huge = without_content(nn.Linear(2**20, 2**20, bias=False, device="meta"))  # 4 TiB
    assert count(lambda: [huge(torch.ones(1, 2**20))], huge).forward == 2 * 2**40


class Experts(nn.Module):
    """Three experts of [4, 8] and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 4)), nn.Parameter(torch.randn(3, 4, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([1, 4, 6], dtype=torch.int32)
        inner = grouped_linear(rows, self.up, None, ends, transposed=False)
        return grouped_linear(inner, self.down, None, ends, transposed=False)


def test_a_grouped_product_counts_each_row_once_however_many_experts_there_are() -> None:
    empty = without_content(Experts())
    rows = torch.empty(6, 4)
    one = 2 * 6 * 4 * 8
    assert count(lambda: [empty(rows)], empty).passes == Passes(Flops(2 * one), Flops(3 * one))


class SelfAttention(nn.Module):
    """Four heads of width 8, two key heads."""

    def __init__(self, **arguments: object) -> None:
        super().__init__()
        self.qkv, self.arguments = nn.Linear(32, 32 + 2 * 16, bias=False), arguments

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        q, k, v = (s.unflatten(-1, (-1, 8)).transpose(1, 2) for s in self.qkv(x_BTC).split([32, 16, 16], -1))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **self.arguments).transpose(1, 2).flatten(2)


def test_torchs_attention_counts_what_its_mask_keeps_and_all_pairs_apart() -> None:
    def attention(**arguments: object) -> Passes:
        empty = without_content(SelfAttention(**arguments))
        (call,) = count(lambda: [empty(torch.empty(2, 6, 32))], empty).attention
        return call.layer.of(call.lengths)

    full, kept = 4 * 2 * (8 + 8) * 2 * 36, 4 * 2 * (8 + 8) * 2 * 21
    assert attention(is_causal=True) == Passes(Flops(0, kept, full), Flops(0, 2 * kept, 2 * full))
    assert attention() == Passes(Flops(0, full, full), Flops(0, 2 * full, 2 * full))
    lower = torch.ones(6, 6, dtype=torch.bool).tril()
    assert attention(attn_mask=lower) == attention(is_causal=True)


def test_attention_over_other_states_counts_all_of_them() -> None:
    class Cross(SelfAttention):
        def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
            q, k, v = (s.unflatten(-1, (-1, 8)).transpose(1, 2) for s in self.qkv(x_BTC).split([32, 16, 16], -1))
            return F.scaled_dot_product_attention(q[:, :, :2], k, v)

    empty = without_content(Cross())
    forward = 2 * 6 * 32 * 64 + 4 * 2 * (8 + 8) * 2 * 6
    assert count(lambda: [empty(torch.empty(1, 6, 32))], empty).passes.forward.total == forward


def test_what_the_backward_computes_again_counts_apart_without_what_is_saved() -> None:
    def again(*saved: str) -> Passes:
        empty = without_content(nn.Sequential(SelfAttention(is_causal=True), nn.Linear(32, 5, bias=False)))
        return count(lambda: [empty(torch.empty(1, 6, 32))], empty, [Recomputed(["0"], saved)]).passes

    products, kept, full = 2 * 6 * 32 * 64, 4 * 2 * 16 * 21, 4 * 2 * 16 * 36
    assert again().again == Flops(products, kept, full)
    assert again("aten.mm").again == Flops(0, kept, full)
    assert again("aten.mm", "aten._scaled_dot_product_flash_attention").again == Flops()
    assert again().hardware == again().model + again().again
