"""Attention of ranks that share a sequence against attention over it in one process."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from omnitrain.ops.attention.backends.reference import REFERENCE
from omnitrain.ops.attention.spec import AttentionCall, MaskSpec
from omnitrain.parallel.sequence.ulysses import UlyssesShard, deal_heads, head_problem
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.state import ParallelState, init_parallel_state
from omnitrain.plan.sequence import split_sequence
from tests.ops.attention.test_backends import FEATURES, MASKS, make_call
from tests.parallel.step.test_feature_exchange import counted_collectives

LEAVES = ("query", "key", "value", "sinks", "position_bias")


def leaves(call: AttentionCall) -> dict[str, Tensor]:
    return {name: value for name in LEAVES if (value := getattr(call, name)) is not None}


def gradients(call: AttentionCall, output: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Of a loss that weighs each element of the whole output by a number of its own."""
    weight = torch.randn(1, call.mask.offsets[-1], *output.shape[2:], generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad((output * weight[:, rows]).sum(), list(leaves(call).values()))
    return dict(zip(leaves(call), found, strict=True))


def shard_call(call: AttentionCall, shard: UlyssesShard, rows: Tensor) -> AttentionCall:
    """As a layer makes it of its local tokens; all else is of the whole sequence."""
    own = {name: getattr(call, name).detach()[:, :, rows].requires_grad_() for name in LEAVES[:3]}
    return replace(call, **own, mask=call.mask.on(shard))


def attend_by_shards(calls: list[tuple[str, str]], cp: int) -> float:
    """The largest error of an output or gradient of these calls."""
    state = init_parallel_state(ulysses_size=dist.get_world_size() // cp, cp_size=cp)
    errors = [attend_by_shard(make_call(mask, feature, requires_grad=True), state) for mask, feature in calls]
    return largest(errors)


def attend_by_shard(call: AttentionCall, state: ParallelState, recompute: bool = False) -> float:
    split = split_sequence(call.query.size(2), sp=state.size("sp"), cp=state.size("cp"))
    shard = UlyssesShard(split, state.sp_group, state.cp_group)
    rows = torch.from_numpy(split.positions[dist.get_rank()])
    assert shard.num_local_tokens == len(rows)
    expected_output = REFERENCE.attend(call)
    expected = gradients(call, expected_output, torch.arange(split.num_tokens))
    own = shard_call(call, shard, rows)
    if recompute:
        output = checkpoint(shard.attend, own, REFERENCE.attend, use_reentrant=False)
    else:
        output = shard.attend(own, REFERENCE.attend)
    found = gradients(own, output, rows)
    errors = [relative(output, expected_output[:, rows], expected_output)]
    for name, gradient in found.items():
        if name in ("sinks", "position_bias"):  # of this rank's heads and rows alone, as of any parameter
            dist.all_reduce(gradient)
        whole = expected[name]
        errors.append(relative(gradient, whole[:, :, rows] if name in LEAVES[:3] else whole, whole))
    return largest(errors)


def largest(errors: list[float]) -> float:
    """NaN where one of them is, which ``max`` may pass over."""
    return float(torch.tensor(errors).max())


def relative(found: Tensor, expected: Tensor, whole: Tensor) -> float:
    """To the largest value of ``whole``: a rank's own part may be zero, as a query's gradient is that sees one key."""
    return float((found - expected).abs().max() / whole.abs().max())


CALLS = [(mask, feature) for mask in MASKS for feature in ("plain", "all")]


@pytest.mark.parametrize("sp", [2, pytest.param(4, marks=pytest.mark.second)])
def test_ulysses_is_the_attention_of_one_process(ranks: RankPool, sp: int) -> None:
    assert largest(ranks.run(attend_by_shards, CALLS, 1, timeout_s=60, world=sp)) < 1e-5


RING_FEATURES = ("plain", "scale", "grouped heads", "value width", "sinks", "softcap")
RING_CALLS = [(mask, feature) for mask in MASKS for feature in RING_FEATURES]


@pytest.mark.parametrize(
    ("world", "cp"), [(2, 2), pytest.param(4, 4, marks=pytest.mark.second), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_ring_is_the_attention_of_one_process(ranks: RankPool, world: int, cp: int) -> None:
    assert largest(ranks.run(attend_by_shards, RING_CALLS, cp, timeout_s=60, world=world)) < 1e-5


def attend_to_random_rows(cp: int, lengths: range, scores_at_once: int) -> float:
    """Rows of random samples, in groups of queries so small that there are many; recomputed in the backward."""
    state = init_parallel_state(ulysses_size=dist.get_world_size() // cp, cp_size=cp)
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omnitrain.ops.attention.online_softmax.SCORES_AT_ONCE", scores_at_once)
        for length in lengths:
            draw = np.random.default_rng(length)
            cuts = np.unique(draw.integers(1, length, size=length % 4))
            mask = MaskSpec((0, *cuts.tolist(), length), causal=bool(length % 3), window=(None, 7)[length % 3 == 2])
            states = [torch.randn(1, 4, length, 8).requires_grad_() for _ in range(3)]
            for tensor in states:
                dist.broadcast(tensor.detach(), 0)
            errors.append(
                attend_by_shard(
                    AttentionCall(*states, mask=mask, softcap=(None, 2.0)[length % 2]), state, recompute=True
                )
            )
    return largest(errors)


@pytest.mark.parametrize(
    ("world", "cp"), [pytest.param(4, 2, marks=pytest.mark.second), pytest.param(4, 4, marks=pytest.mark.slow), (4, 1)]
)
def test_rows_of_any_length_and_samples_of_any_length(ranks: RankPool, world: int, cp: int) -> None:
    assert largest(ranks.run(attend_to_random_rows, cp, range(4, 98, 5), 64, timeout_s=60, world=world)) < 1e-5


def ring_in_bfloat16() -> float:
    """Against fp32 of the same inputs, relative to what one process in bf16 is off by."""
    state = init_parallel_state(cp_size=dist.get_world_size())
    call = make_call("causal", "grouped heads", requires_grad=True)
    half = replace(call, **{name: value.detach().bfloat16().requires_grad_() for name, value in leaves(call).items()})
    split = split_sequence(half.query.size(2), sp=1, cp=state.size("cp"))
    rows = torch.from_numpy(split.positions[dist.get_rank()])
    shard = UlyssesShard(split, state.sp_group, state.cp_group)
    exact = REFERENCE.attend(replace(half, **{name: value.detach().float() for name, value in leaves(half).items()}))
    found = shard.attend(shard_call(half, shard, rows), REFERENCE.attend)
    assert found.dtype == torch.bfloat16
    return relative(found.float(), exact[:, rows], exact) / relative(REFERENCE.attend(half).float(), exact, exact)


def test_ring_in_bfloat16_is_as_exact_as_one_process(ranks: RankPool) -> None:
    assert largest(ranks.run(ring_in_bfloat16, timeout_s=30)) < 2


def rows_sent(offsets: tuple[int, ...]) -> list[int]:
    """Keys that this rank sends around the ring of 2, forward and backward."""
    state = init_parallel_state(cp_size=dist.get_world_size())
    split = split_sequence(offsets[-1], sp=1, cp=2)
    shard = UlyssesShard(split, state.sp_group, state.cp_group)
    states = [torch.zeros(1, 2, shard.num_local_tokens, 4, requires_grad=True) for _ in range(3)]
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        made = dist.P2POp
        patch.setattr(dist, "P2POp", lambda way, x, *more: sent.append((way, x.size(1))) or made(way, x, *more))
        shard.attend(
            AttentionCall(*states, mask=MaskSpec(offsets, causal=True).on(shard)), REFERENCE.attend
        ).sum().backward()
    return [rows for way, rows in sent if way is dist.isend]


def test_only_pieces_of_samples_that_several_ranks_have_go_around_the_ring(ranks: RankPool) -> None:
    # Chunks of 4 tokens: rank 0 has 0 to 3 and 12 to 15, rank 1 the others.
    assert ranks.run(rows_sent, (0, 4, 12, 16), timeout_s=30, world=2) == [[], []]
    # Keys and values there, both again in the backward, and two hops of their gradients.
    assert ranks.run(rows_sent, (0, 1, 7, 12, 16), timeout_s=30, world=2) == [[3] * 8, [3] * 8]


def refused_around_a_ring(name: str) -> None:
    state = init_parallel_state(cp_size=dist.get_world_size())
    call = make_call("floats", name if name in FEATURES else "plain")
    if name == "dropout":
        call = replace(call, dropout=0.5)
    if name == "a mask with gradients":
        call.mask.general.requires_grad_()
    split = split_sequence(call.query.size(2), sp=1, cp=state.size("cp"))
    shard = UlyssesShard(split, state.sp_group, state.cp_group)
    shard.attend(shard_call(call, shard, torch.from_numpy(split.positions[dist.get_rank()])), REFERENCE.attend)


@pytest.mark.parametrize(
    ("name", "found"),
    [("dropout", "dropout"), ("position_bias", "a position bias"), ("a mask with gradients", "a mask with gradients")],
)
def test_what_a_ring_does_not_honour_is_refused_by_name(ranks: RankPool, name: str, found: str) -> None:
    with pytest.raises(RankError, match=f"ring attention does not support {found}; set cp to 1"):
        ranks.run(refused_around_a_ring, name, timeout_s=30, world=2)


def bytes_sent(num_heads: int, num_key_heads: int, tokens: int, dtype: torch.dtype) -> list[int]:
    """In the forward, there and back, and in the backward."""
    state = init_parallel_state(ulysses_size=dist.get_world_size())
    split = split_sequence(tokens, sp=dist.get_world_size())
    shard = UlyssesShard(split, state.sp_group, state.cp_group)
    states = [
        torch.zeros(1, heads, shard.num_local_tokens, 8, dtype=dtype, requires_grad=True)
        for heads in (num_heads, num_key_heads, num_key_heads)
    ]
    with counted_collectives() as sent:
        spec = MaskSpec((0, 5, tokens), causal=True).on(shard)
        shard.attend(AttentionCall(*states, mask=spec), REFERENCE.attend).sum().backward()
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
