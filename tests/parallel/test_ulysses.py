"""Attention of ranks that share a row against attention over the row in one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from omnitrain.ops.attention.backends.reference import REFERENCE
from omnitrain.ops.attention.call import Call
from omnitrain.ops.attention.mask_spec import MaskSpec
from omnitrain.parallel.ranks import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.ulysses import UlyssesShard, deal_heads, head_problem
from omnitrain.plan.sequence import split_sequence
from tests.ops.test_attention_backends import MASKS, make_call
from tests.parallel.test_exchange import counted_collectives

LEAVES = ("query", "key", "value", "sinks", "position_bias")


def leaves(call: Call) -> dict[str, Tensor]:
    return {name: value for name in LEAVES if (value := getattr(call, name)) is not None}


def gradients(call: Call, output: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Of a loss that weighs each element of the whole output by a number of its own."""
    weight = torch.randn(1, call.mask.borders[-1], *output.shape[2:], generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad((output * weight[:, rows]).sum(), list(leaves(call).values()))
    return dict(zip(leaves(call), found, strict=True))


def shard_call(call: Call, shard: UlyssesShard, rows: Tensor) -> Call:
    """As a layer makes it of its own rows; all else is of the whole row."""
    own = {name: getattr(call, name).detach()[:, :, rows].requires_grad_() for name in LEAVES[:3]}
    return replace(call, **own, mask=call.mask.on(shard))


def attend_by_shards(calls: list[tuple[str, str]], cp: int) -> float:
    """The largest error of an output or gradient of these calls."""
    state = init_parallel_state(ulysses_size=dist.get_world_size() // cp, cp_size=cp)
    errors = [attend_by_shard(make_call(mask, feature, requires_grad=True), state) for mask, feature in calls]
    return max(errors)


def attend_by_shard(call: Call, state: Any) -> float:
    split = split_sequence(call.query.size(2), sp=state.size("sp"), cp=state.size("cp"))
    shard = UlyssesShard(split, state.sp_group, state.cp_group)
    rows = torch.from_numpy(split.rows[dist.get_rank()])
    assert shard.num_rows == len(rows)
    expected_output = REFERENCE.attend(call)
    expected = gradients(call, expected_output, torch.arange(split.num_tokens))
    own = shard_call(call, shard, rows)
    output = shard.attend(own, REFERENCE.attend)
    found = gradients(own, output, rows)
    errors = [relative(output, expected_output[:, rows])]
    for name, gradient in found.items():
        if name in ("sinks", "position_bias"):  # of this rank's heads and rows alone, as of any parameter
            dist.all_reduce(gradient)
        whole = expected[name]
        errors.append(relative(gradient, whole[:, :, rows] if name in LEAVES[:3] else whole))
    return max(errors)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


CALLS = [(mask, feature) for mask in MASKS for feature in ("plain", "all")]


@pytest.mark.parametrize("sp", [2, 4])
def test_ulysses_is_the_attention_of_one_process(ranks: RankPool, sp: int) -> None:
    assert max(ranks.run(attend_by_shards, CALLS, 1, timeout_s=60, world=sp)) < 1e-5


def bytes_sent(num_heads: int, num_key_heads: int, tokens: int, dtype: torch.dtype) -> list[int]:
    """In the forward, there and back, and in the backward."""
    state = init_parallel_state(ulysses_size=dist.get_world_size())
    split = split_sequence(tokens, sp=dist.get_world_size())
    shard = UlyssesShard(split, state.sp_group, state.cp_group)
    states = [
        torch.zeros(1, heads, shard.num_rows, 8, dtype=dtype, requires_grad=True)
        for heads in (num_heads, num_key_heads, num_key_heads)
    ]
    with counted_collectives() as sent:
        spec = MaskSpec((0, 5, tokens), causal=True).on(shard)
        shard.attend(Call(*states, mask=spec), REFERENCE.attend).sum().backward()
    return sent


@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(8, 8), (8, 4), (8, 2), (4, 1)])
def test_bytes_are_those_of_the_formula_in_one_collective_each_way(
    ranks: RankPool, num_heads: int, num_key_heads: int
) -> None:
    sp, tokens, width, itemsize = 4, 64, 8, 2
    key_heads = max(num_key_heads, sp)  # a rank cannot have less than a head
    formula = 2 * (num_heads + key_heads) * width * tokens * itemsize * (sp - 1) / sp**2
    for forward in ranks.run(bytes_sent, num_heads, num_key_heads, tokens, torch.bfloat16, timeout_s=30):
        there, back, *backward = [size * (sp - 1) / sp for size in forward]  # without what a rank keeps for itself
        assert there + back <= 1.02 * formula
        assert backward == [back, there]


@pytest.mark.parametrize("sp", [2, 4, 6])
@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(12, 12), (12, 6), (12, 4), (12, 3), (12, 1)])
def test_every_query_gets_its_key_head(num_heads: int, num_key_heads: int, sp: int) -> None:
    for rank in range(sp):
        heads = deal_heads(num_heads, num_key_heads, sp, rank)
        first, stop = heads.keys[rank]
        own = range(*heads.queries[rank])
        readers = len(own) // (stop - first)
        keys = heads.own_keys or [place // readers for place in range(len(own))]
        assert [first + key for key in keys] == [head * num_key_heads // num_heads for head in own]


def test_degrees_that_do_not_divide_the_heads_are_told() -> None:
    assert head_problem(12, 4) is None
    assert head_problem(6, 4) == "4 ranks cannot share 6 heads equally; 1, 2, 3, 6 can"
