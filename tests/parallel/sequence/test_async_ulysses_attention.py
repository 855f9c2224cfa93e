"""Async Ulysses: attention modules of transformers whose projections overlap their all-to-alls."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.ops.attention.install import use_omnitrain_attention
from omnitrain.ops.attention.spec import MaskSpec
from omnitrain.parallel.sequence.async_ulysses.attention import AttentionLayout, use_async_ulysses, why_not_async
from omnitrain.parallel.sequence.async_ulysses.check import AttentionLayouts, attention_layouts, kind_of
from omnitrain.parallel.sequence.ulysses import UlyssesShard
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import ParallelState, init_parallel_state
from omnitrain.plan.sequence import split_sequence

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def tiny(model_type: str, key_heads: int = 2) -> Any:
    config = AutoConfig.for_model(model_type, **SIZES | {"num_key_value_heads": key_heads})
    torch.manual_seed(0)
    return build_omni_model(foundation=foundation_class(config)(config).train())


def layouts(model_type: str, key_heads: int = 2) -> AttentionLayouts:
    omni = tiny(model_type, key_heads)
    return attention_layouts(omni.foundation, omni.runner.contract)


def attention_gradients(
    foundation: Any, attention: nn.Module, state: ParallelState, tokens: int, recompute: bool
) -> list[Tensor]:
    """Output of this rank's rows, and the gradients of its hidden states and of each parameter."""
    split = split_sequence(tokens, sp=state.size("sp"), cp=state.size("cp"))
    shard = UlyssesShard(split, state.sp_group, state.cp_group)
    rows = torch.from_numpy(split.positions[dist.get_rank()])
    draw = torch.Generator().manual_seed(1)
    dtype = next(attention.parameters()).dtype
    hidden, of_output = torch.randn(2, 1, tokens, 32, generator=draw).to(dtype)[:, :, rows]
    hidden.requires_grad_()
    spec = MaskSpec((0, tokens // 3, tokens), causal=True).on(shard)
    tables = foundation.model.rotary_emb(hidden, rows[None])
    arguments = {"hidden_states": hidden, "position_embeddings": tables, "attention_mask": spec}
    run = (lambda **given: checkpoint(attention, use_reentrant=False, **given)) if recompute else attention
    output, _ = run(**arguments)
    inputs = [hidden, *attention.parameters()]
    return [output, *torch.autograd.grad(output, inputs, of_output)]


def async_and_plain(
    model_type: str, layout: AttentionLayout, cp: int, dtype: torch.dtype, recompute: bool
) -> list[bool]:
    """For several lengths, whether each tensor has the same bits."""
    state = init_parallel_state(ulysses_size=dist.get_world_size() // cp, cp_size=cp)
    foundation = tiny(model_type, layout.num_key_heads).foundation.to(dtype)
    use_omnitrain_attention(foundation)
    attention = foundation.model.layers[0].self_attn
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(2))
    lengths = (8, 97, 256)
    plain = [attention_gradients(foundation, attention, state, tokens, recompute) for tokens in lengths]
    use_async_ulysses(attention, layout)
    overlapped = [attention_gradients(foundation, attention, state, tokens, recompute) for tokens in lengths]
    return [
        torch.equal(one, other) for a, b in zip(plain, overlapped, strict=True) for one, other in zip(a, b, strict=True)
    ]


@pytest.mark.parametrize(
    ("model_type", "world", "cp", "dtype", "recompute"),
    [
        ("qwen3", 2, 1, torch.float32, False),
        ("qwen3", 4, 1, torch.float32, True),
        ("qwen3", 4, 2, torch.float32, False),
        ("olmo2", 4, 1, torch.float32, False),
        ("gpt_oss", 2, 1, torch.float32, False),
        ("qwen3", 2, 1, torch.bfloat16, False),
    ],
)
def test_async_attention_has_the_bits_of_plain_ulysses(
    ranks: RankPool, model_type: str, world: int, cp: int, dtype: torch.dtype, recompute: bool
) -> None:
    (layout,) = layouts(model_type, key_heads=max(2, world // cp)).values()
    assert isinstance(layout, AttentionLayout), layout
    for same in ranks.run(async_and_plain, model_type, layout, cp, dtype, recompute, timeout_s=60, world=world):
        assert all(same), same


def test_projections_and_norms_are_found_by_what_they_read() -> None:
    (layout,) = layouts("qwen3").values()
    assert isinstance(layout, AttentionLayout)
    assert [(i.linear, i.is_key, i.norm) for i in layout.inputs] == [
        ("q_proj", False, "q_norm"),
        ("k_proj", True, "k_norm"),
        ("v_proj", True, ""),
    ]
    assert (layout.hidden, layout.output, layout.num_heads, layout.num_key_heads) == ("hidden_states", "o_proj", 4, 2)


def test_a_module_that_cannot_use_it_stays_plain_with_the_reason() -> None:
    assert list(layouts("phi3").values()) == ["qkv_proj makes queries and keys in one"]


def test_a_module_whose_rotary_tables_are_trained_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Qwen3RotaryEmbedding.forward

    def trained(*given: Any) -> tuple[Tensor, ...]:
        return tuple(table.requires_grad_() for table in tables(*given))

    monkeypatch.setattr(Qwen3RotaryEmbedding, "forward", trained)
    assert list(layouts("qwen3").values()) == ["its argument position_embeddings has gradients, too"]


def test_projections_that_were_changed_and_key_heads_that_ranks_share_are_left_alone() -> None:
    omni = tiny("qwen3")
    attention = omni.foundation.model.layers[0].self_attn
    layout = attention_layouts(omni.foundation, omni.runner.contract)[kind_of(attention)]
    assert isinstance(layout, AttentionLayout)
    assert why_not_async(attention, layout, 2) is None
    assert why_not_async(attention, layout, 4) == "ulysses 4 does not divide its 2 key heads"
    handle = attention.k_norm.register_forward_hook(lambda *_: None)
    assert why_not_async(attention, layout, 2) == "k_norm has hooks"
    handle.remove()
    attention.v_proj.forward = attention.v_proj.forward
    assert why_not_async(attention, layout, 2) == "v_proj has another forward"


def test_a_deep_copy_of_an_async_module_computes_with_its_own_weights() -> None:
    omni = tiny("qwen3")
    attention = omni.foundation.model.layers[0].self_attn
    use_async_ulysses(attention, next(iter(attention_layouts(omni.foundation, omni.runner.contract).values())))
    other = copy.deepcopy(attention)
    other.o_proj.weight.data.zero_()
    hidden = torch.randn(1, 5, 32)
    tables = omni.foundation.model.rotary_emb(hidden, torch.arange(5)[None])
    outputs = [module(hidden, position_embeddings=tables, attention_mask=None)[0] for module in (attention, other)]
    assert [bool(output.any()) for output in outputs] == [True, False]
