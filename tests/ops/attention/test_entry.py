"""The entry point: what it takes for a packed sequence, what it hands through, what it refuses."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from omnitrain.errors import UserError
from omnitrain.ops.attention import spec
from omnitrain.ops.attention.entry import CHOSEN, HONOURED, IRRELEVANT
from omnitrain.ops.attention.install import ATTENTION_NAME
from omnitrain.ops.attention.packed_context import packed, packed_sequence
from omnitrain.ops.attention.spec import MaskSpec
from omnitrain.ops.recompute import recompute_contexts

OFFSETS = (0, 4, 8, 13)
attend = AttentionInterface._global_mapping[ATTENTION_NAME]


class CausalLayer(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 2


class TowerLayer(torch.nn.Module):
    is_causal = False
    num_key_value_groups = 2


def draw(length: int = OFFSETS[-1]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, heads, length, 8, generator=generator) for heads in (4, 2, 2))


def alone(causal: bool, **kwargs: Any) -> torch.Tensor:
    parts = []
    for start, stop in itertools.pairwise(OFFSETS):
        q, k, v = (x[:, :, start:stop] for x in draw())
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, **kwargs))
    return torch.cat(parts, 2).transpose(1, 2)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("layer", [CausalLayer(), TowerLayer()])
def test_offsets_in_arguments_cut_the_row(layer: torch.nn.Module) -> None:
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    out, _ = attend(layer, *draw(), None, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=5, max_length_k=5)
    assert close(out, alone(layer.is_causal))


class ListReads(TorchFunctionMode):
    """Counts tensors whose values are read into Python, for which a GPU would be waited for."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.Tensor.tolist
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("by", ["context", "argument"])
def test_layers_of_two_rows_in_flight_make_each_mask_once(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Layers of both rows take turns, and every other layer has a window."""
    made: list[tuple[int, ...]] = []  # no references to the specs: they must live without the test

    def make(offsets: tuple[int, ...], **kwargs: Any) -> MaskSpec:
        made.append(offsets)
        return MaskSpec(offsets, **kwargs)

    monkeypatch.setattr(spec, "MaskSpec", make)
    rows = [(0, 4, 9, 13), (0, 6, 13)]
    contexts, tensors = [packed(row) for row in rows], [torch.tensor(row) for row in rows]
    for window in (None, 3) * 3:
        for context, offsets in zip(contexts, tensors, strict=True):
            with context if by == "context" else packed(None):
                given = {} if by == "context" else {"cu_seq_lens_q": offsets}
                attend(CausalLayer(), *draw(), None, sliding_window=window, **given)
    assert sorted(made) == sorted(rows * 2)


def test_layers_with_the_same_offsets_read_them_once_and_again_when_they_change() -> None:
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    with ListReads() as reads:
        for _ in range(5):
            attend(TowerLayer(), *draw(), None, cu_seq_lens_q=offsets)
        assert reads.count == 1
        offsets[1] = 3
        out, _ = attend(TowerLayer(), *draw(), None, cu_seq_lens_q=offsets)
    assert reads.count == 2
    assert not close(out[:, :8], alone(causal=False)[:, :8])


def test_a_window_in_arguments_holds_where_the_model_makes_no_mask() -> None:
    cu_seqlens = torch.tensor(OFFSETS)
    plain, _ = attend(CausalLayer(), *draw(), None, cu_seq_lens_q=cu_seqlens)
    wide, _ = attend(CausalLayer(), *draw(), None, cu_seq_lens_q=cu_seqlens, sliding_window=5)
    narrow, _ = attend(CausalLayer(), *draw(), None, cu_seq_lens_q=cu_seqlens, sliding_window=1)
    assert torch.equal(plain, wide)
    values = draw()[2].repeat_interleave(2, 1).transpose(1, 2)
    assert close(narrow, values)  # each token sees itself alone
    with pytest.raises(UserError, match="window of 2 without a causal mask"):
        attend(TowerLayer(), *draw(), None, cu_seq_lens_q=cu_seqlens, sliding_window=2)


@pytest.mark.parametrize("layer", [CausalLayer(), TowerLayer()])
def test_a_model_that_makes_no_mask_is_cut_by_the_context(layer: torch.nn.Module) -> None:
    with packed(OFFSETS):
        out, _ = attend(layer, *draw(), None)
    assert close(out, alone(layer.is_causal))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_a_model_makes_itself_is_cut_at_the_offsets(dtype: torch.dtype) -> None:
    seen = torch.ones(13, 13, dtype=torch.bool).tril()[None, None]
    mask = seen if dtype == torch.bool else torch.where(seen, 0.0, torch.finfo(dtype).min)
    with packed(OFFSETS):
        out, _ = attend(TowerLayer(), *draw(), mask)
    assert close(out, alone(causal=True))


def test_a_padding_mask_is_not_taken_for_a_mask_of_queries_and_keys() -> None:
    padding = torch.ones(1, 13, dtype=torch.bool)
    with pytest.raises(UserError, match=r"TowerLayer passes a padding mask of shape \(1, 13\)"):
        attend(TowerLayer(), *draw(), padding)
    with packed(OFFSETS), pytest.raises(UserError, match=r"shape \(1, 13\) does not fit a packed sequence"):
        attend(TowerLayer(), *draw(), padding)


def test_without_offsets_it_is_sdpa_bit_for_bit() -> None:
    sdpa = AttentionInterface._global_mapping["sdpa"]
    mask = torch.ones(1, 1, 13, 13, dtype=torch.bool).tril()
    for layer, given in itertools.product((CausalLayer(), TowerLayer()), (None, mask)):
        ours, theirs = attend(layer, *draw(), given, scaling=0.3), sdpa(layer, *draw(), given, scaling=0.3)
        assert torch.equal(ours[0], theirs[0])
    bias = torch.ones(1, 4, 13, 13).triu()
    ours, theirs = (f(CausalLayer(), *draw(), None, position_bias=bias) for f in (attend, sdpa))
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("name", ["sinks", "head_mask", "attention_bias", "indices", "output_attentions", "anything"])
def test_an_argument_that_is_not_known_is_refused_by_name(name: str) -> None:
    spec = MaskSpec(OFFSETS, causal=True)
    with pytest.raises(UserError, match=f"CausalLayer passes {name} to its attention"):
        attend(CausalLayer(), *draw(), spec, **{name: torch.ones(1)})
    attend(CausalLayer(), *draw(), spec, **{name: None})
    attend(CausalLayer(), *draw(), spec, **{name: False})


def test_each_argument_has_one_place() -> None:
    assert not HONOURED & IRRELEVANT.keys()
    spec = MaskSpec(OFFSETS, causal=True)
    attend(CausalLayer(), *draw(), spec, **dict.fromkeys(IRRELEVANT, 1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_keys_that_a_model_leaves_to_attention_are_the_only_ones_seen(dtype: torch.dtype) -> None:
    """Models scatter their choice into the mask themselves for implementations called sdpa and eager only."""
    indices = torch.arange(13)[None, :, None].expand(1, 13, 2) // torch.tensor([1, 2])  # its own place, and half of it
    seen = torch.ones(1, 1, 13, 13, dtype=torch.bool).tril()
    mask = seen if dtype == torch.bool else torch.where(seen, 0.0, torch.finfo(dtype).min)
    found, _ = attend(CausalLayer(), *draw(), mask, indices=indices)
    chosen = torch.zeros(1, 1, 13, 13, dtype=torch.bool).scatter(-1, indices[:, None], True)
    expected, _ = attend(CausalLayer(), *draw(), chosen)
    assert close(found, expected)
    with pytest.raises(UserError, match="passes indices to its attention, but makes no mask"):
        attend(CausalLayer(), *draw(), None, indices=indices)


def test_blocks_of_keys_left_to_attention_are_refused_without_packing_too() -> None:
    with pytest.raises(UserError, match="CausalLayer passes block_indices to its attention"):
        attend(CausalLayer(), *draw(), None, block_indices=torch.zeros(1))


def test_sinks_and_soft_cap_reach_the_backend() -> None:
    spec = MaskSpec(OFFSETS, causal=True)
    plain, _ = attend(CausalLayer(), *draw(), spec)
    capped, _ = attend(CausalLayer(), *draw(), spec, softcap=0.1)
    low, _ = attend(CausalLayer(), *draw(), spec, s_aux=torch.full((4,), -100.0))
    high, _ = attend(CausalLayer(), *draw(), spec, s_aux=torch.full((4,), 100.0))
    assert close(low, plain)
    assert high.abs().max() < 1e-30
    assert (capped - plain).abs().max() > 0.1
    assert {"reference", "sdpa"} <= {used.name for (module, *_), used in CHOSEN.items() if module == "CausalLayer"}


def test_a_layer_that_contradicts_its_mask_is_refused() -> None:
    with pytest.raises(UserError, match=r"TowerLayer: the model's mask is causal.*is_causal=False"):
        attend(TowerLayer(), *draw(), MaskSpec(OFFSETS, causal=True))
    with pytest.raises(UserError, match=r"the model's mask is full.*is_causal=True"):
        attend(CausalLayer(), *draw(), MaskSpec(OFFSETS))
    attend(CausalLayer(), *draw(), MaskSpec(OFFSETS), is_causal=False)


@pytest.mark.parametrize("mask", [None, MaskSpec(OFFSETS, causal=True)])
def test_a_row_of_another_length_is_refused(mask: MaskSpec | None) -> None:
    with packed(OFFSETS), pytest.raises(UserError, match=r"\(1, 14, 14\).*13"):
        attend(CausalLayer(), *draw(14), mask)


def test_a_packed_row_that_reads_other_tokens_is_refused() -> None:
    query, (_, key, value) = draw()[0], draw(20)
    with packed(OFFSETS), pytest.raises(UserError, match=r"TowerLayer.*\(1, 13, 20\)"):
        attend(TowerLayer(), query, key, value, None)


def test_a_tower_inside_the_context_stays_whole() -> None:
    whole, _ = attend(TowerLayer(), *draw(20), None)
    with packed(OFFSETS):
        inside, _ = attend(TowerLayer(), *draw(20), None)
    assert torch.equal(whole, inside)


def test_different_offsets_of_queries_and_keys_are_refused() -> None:
    with pytest.raises(UserError, match="different offsets"):
        attend(
            CausalLayer(),
            *draw(),
            None,
            cu_seq_lens_q=torch.tensor(OFFSETS),
            cu_seq_lens_k=torch.tensor([0, 6, 7, 13]),
        )


def test_contexts_nest_and_can_be_entered_again() -> None:
    row = packed([0, 2, 2, 5])
    with row:
        with packed(None):
            assert packed_sequence() is None
        with row, row:
            assert packed_sequence().offsets == (0, 2, 2, 5)
        assert packed_sequence().offsets == (0, 2, 2, 5)
    assert packed_sequence() is None


@pytest.mark.parametrize("offsets", [(), (1, 4), (0, 5, 3)])
def test_offsets_that_are_none_are_refused(offsets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must start at 0"):
        packed(offsets)


def test_a_recomputation_that_lost_the_offsets_is_refused() -> None:
    """Only a model that makes no mask needs the context in its recomputation."""
    layer, (query, key, value) = CausalLayer(), draw()
    query.requires_grad_()

    def forward(mask: MaskSpec | None, **options: Any) -> torch.Tensor:
        return checkpoint(lambda q: attend(layer, q, key, value, mask)[0], query, use_reentrant=False, **options)

    with packed(OFFSETS):
        by_spec, by_context = forward(MaskSpec(OFFSETS, causal=True)), forward(None)
    (expected,) = torch.autograd.grad(by_spec.sum(), query)
    with pytest.raises(UserError, match="recomputed outside of packed"):
        torch.autograd.grad(by_context.sum(), query)
    with packed(OFFSETS):
        by_context = forward(None, context_fn=recompute_contexts)
    (found,) = torch.autograd.grad(by_context.sum(), query)
    assert torch.equal(found, expected)
    torch.autograd.grad(forward(None, context_fn=recompute_contexts).sum(), query)  # its input was not packed
