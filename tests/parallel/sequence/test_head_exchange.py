from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.autograd import gradcheck

import omnitrain as ot
from omnitrain.ops.collectives import gather_rows
from omnitrain.parallel.sequence.head_exchange import tokens_to_heads
from omnitrain.parallel.spawn.pool import RankError, RankPool

LENGTHS = {1: [5], 2: [3, 4], 4: [1, 5, 0, 2]}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def there_and_back(lengths: Sequence[int], dtype: torch.dtype, say_lengths: bool) -> None:
    """Batch first, rows, width, heads: as no attention here has it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = draw(2, sum(lengths), 3, 8, dtype=dtype)
    own = whole.split(list(lengths), dim=1)[rank].requires_grad_()
    group = dist.group.WORLD
    heads = ot.gather_seq_scatter_heads(own, 1, 3, group, lengths=lengths if say_lengths else None)
    assert torch.equal(heads, whole.chunk(world, dim=-1)[rank])
    back = ot.gather_heads_scatter_seq(heads, -1, -3, group, lengths=lengths)
    assert torch.equal(back, own)
    back.backward(gradient := torch.full_like(back, 2.0 + rank))
    assert torch.equal(own.grad, gradient)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_heads_and_back_at_any_lengths(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    for say_lengths in (True, False):
        ranks.run(there_and_back, LENGTHS[world], dtype, say_lengths, timeout_s=30, world=world)


def nearly_equal_parts() -> list[int]:
    return ot.gather_heads_scatter_seq(torch.arange(7)[:, None], 1, 0, dist.group.WORLD)[:, 0].tolist()


def test_rows_are_dealt_nearly_equally_where_no_lengths_are_given(ranks: RankPool) -> None:
    assert ranks.run(nearly_equal_parts, timeout_s=30) == [[0, 1], [2, 3], [4, 5], [6]]


def gradients_of_one_process(lengths: Sequence[int]) -> None:
    """Of a sum over heads that weighs them differently, and of its rows, against autograd on the whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = draw(sum(lengths), 4).double().requires_grad_()
    weight = torch.arange(4.0).double() + 1
    (whole.cumsum(0) * weight).square().sum().backward()
    own = whole.detach().split(list(lengths))[rank].requires_grad_()
    heads = ot.gather_seq_scatter_heads(own, 0, 1, dist.group.WORLD, lengths=lengths)
    rows = ot.gather_heads_scatter_seq(heads.cumsum(0), 1, 0, dist.group.WORLD, lengths=lengths)
    (rows * weight).square().sum().backward()
    torch.testing.assert_close(own.grad, whole.grad.split(list(lengths))[rank])
    assert world > 1


def test_gradients_are_those_of_one_process(ranks: RankPool) -> None:
    ranks.run(gradients_of_one_process, [3, 1, 0, 4], timeout_s=30)


def adjoint(spans: list[list[tuple[int, int]]]) -> float:
    """<Gx, y> - <x, G'y> over all ranks, for tensors of several widths and dtypes."""
    rank, rows = dist.get_rank(), [2, 0, 3, 1]
    own = [draw(rows[rank], 4, 3).requires_grad_(), draw(rows[rank], 2, 5).bfloat16().requires_grad_()]
    outputs = tokens_to_heads(own, spans, rows, dist.group.WORLD)
    gradients = [torch.randint(-4, 5, output.shape).to(output.dtype) for output in outputs]  # exact in bf16, too
    back = torch.autograd.grad(outputs, own, gradients)
    there = sum((x.double() * y.double()).sum() for x, y in zip(outputs, gradients, strict=True))
    difference = there - sum((x.double() * y.double()).sum() for x, y in zip(own, back, strict=True))
    dist.all_reduce(difference)
    assert [output.dtype for output in outputs] == [torch.float32, torch.bfloat16]
    assert [gradient.dtype for gradient in back] == [torch.float32, torch.bfloat16]
    return float(difference.abs())


def test_the_backward_is_the_adjoint_also_where_ranks_share_heads(ranks: RankPool) -> None:
    shared = [[(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1), (0, 1), (1, 2), (1, 2)]]
    assert all(error < 1e-4 for error in ranks.run(adjoint, shared, timeout_s=30))


def numeric_gradients() -> None:
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    group = dist.group.WORLD
    assert gradcheck(lambda x: ot.gather_seq_scatter_heads(x, 0, 1, group, lengths=[3]).square(), x)
    assert gradcheck(lambda x: ot.gather_heads_scatter_seq(x, 1, 0, group).square(), x)


def test_gradients_are_the_numeric_ones(ranks: RankPool) -> None:
    ranks.run(numeric_gradients, timeout_s=30, world=1)


def gradient_of_gathered_rows() -> None:
    x, weight = torch.rand(2, 3, 2, dtype=torch.float64)
    gathered = gather_rows(x.requires_grad_(), [3], dist.group.WORLD)
    (gradient,) = torch.autograd.grad((gathered * weight).sum(), x)
    assert torch.equal(gradient, weight)


def test_gradients_of_gathered_rows_keep_their_precision(ranks: RankPool) -> None:
    ranks.run(gradient_of_gathered_rows, timeout_s=30, world=1)


def scatter_heads(num_heads: int) -> None:
    ot.gather_seq_scatter_heads(torch.zeros(1, num_heads), 0, 1, dist.group.WORLD, lengths=[1] * 4)


def wrong_lengths() -> None:
    ot.gather_heads_scatter_seq(torch.zeros(5, 1), 1, 0, dist.group.WORLD, lengths=[1] * 4)


def test_heads_that_do_not_divide_are_refused_with_the_degrees_that_do(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="4 ranks cannot share 6 heads equally; 1, 2, 3, 6 can"):
        ranks.run(scatter_heads, 6, timeout_s=30)
    with pytest.raises(RankError, match=r"lengths: found \[1, 1, 1, 1\]; expected 4 numbers that add up to 5"):
        ranks.run(wrong_lengths, timeout_s=30)
