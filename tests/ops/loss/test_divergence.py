"""The divergence from a teacher, chunk by chunk: what torch's ``kl_div`` gives for all logits."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from omnitrain.ops.loss import divergence
from omnitrain.ops.loss.divergence import Divergence, Taught, linear_divergence
from omnitrain.ops.loss.linear import LossTerm

ROWS, CLASSES, SHARED, HIDDEN, WIDTH = 13, 50, 44, 16, 12
KINDS = ("forward_kl", "reverse_kl", "jsd")
CASES = [(kind, temperature, top_k) for kind in KINDS for temperature, top_k in [(1.0, None), (2.0, None), (0.7, 5)]]


def problem(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], Taught]:
    """Hidden states, weight and bias of a student, and a teacher that lacks its last six classes."""
    torch.manual_seed(0)
    own = [torch.randn(*shape, dtype=torch.float64) for shape in ((ROWS, HIDDEN), (CLASSES, HIDDEN), (CLASSES,))]
    theirs = [torch.randn(*shape, dtype=torch.float64) for shape in ((ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,))]
    own[1], theirs[1] = own[1] / 2, theirs[1] / 2  # logits of size 2, as rounding allows errors of 1e-5 in fp32
    own[2][7] = theirs[2][7] = 4.0  # they agree on some rows
    return [x.to(dtype).requires_grad_() for x in own], Taught(*[x.to(dtype) for x in theirs], SHARED)


def by_torch(student: torch.Tensor, teacher: torch.Tensor, how: Divergence) -> torch.Tensor:
    """The divergence of each row ``[n]`` of logits ``[n, classes]``."""
    q, p = (logits / how.temperature for logits in (student, teacher))
    if how.top_k is not None:
        top = p.topk(how.top_k).indices
        rest = torch.ones_like(p, dtype=torch.bool).scatter(1, top, False)
        q, p = (
            torch.cat([x.gather(1, top), x.masked_fill(~rest, -math.inf).logsumexp(1, keepdim=True)], 1) for x in (q, p)
        )
    q, p = q.log_softmax(1), p.log_softmax(1)
    middle = torch.stack([q, p]).logsumexp(0) - math.log(2)
    pairs = {"forward_kl": [(q, p, 1.0)], "reverse_kl": [(p, q, 1.0)], "jsd": [(middle, p, 0.5), (middle, q, 0.5)]}
    parts = [part * F.kl_div(x, of, reduction="none", log_target=True).sum(1) for x, of, part in pairs[how.kind]]
    return how.temperature**2 * sum(parts)


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, taught: Taught, how: Divergence) -> LossTerm:
    student = F.linear(hidden, weight, bias)[:, :SHARED]
    teacher = F.linear(taught.hidden, taught.weight, taught.bias)[:, :SHARED]
    rows = by_torch(student, teacher, how)
    p, q = ((logits / how.temperature).softmax(1) for logits in (teacher, student))
    metrics = {"agreement": (student.argmax(1) == teacher.argmax(1)).to(rows.dtype)}
    metrics |= {"entropy": -(q * q.log()).sum(1), "teacher_entropy": -(p * p.log()).sum(1)}
    return LossTerm(rows.sum(), len(rows), rows.detach(), {name: of.detach() for name, of in metrics.items()})


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize(("kind", "temperature", "top_k"), CASES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_it_is_torchs_kl_div_over_the_shared_classes(kind, temperature, top_k, dtype, bound, monkeypatch):
    monkeypatch.setitem(divergence._BLOCK_BYTES, "cpu", 2 * CLASSES * 4)  # blocks of 2 rows in chunks of 5
    (hidden, weight, bias), taught = problem(dtype)
    how = Divergence(kind, temperature, top_k)
    ours = linear_divergence(hidden, weight, taught, how, bias, chunk_elements=5 * CLASSES)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    exactly = Taught(taught.hidden.double(), taught.weight.double(), taught.bias.double(), SHARED)
    theirs = plain(*exact, exactly, how)
    found = torch.autograd.grad(ours.sum * 0.125, [hidden, weight, bias])
    expected = torch.autograd.grad(theirs.sum * 0.125, exact)
    assert ours.count == ROWS and relative_error(ours.rows, theirs.rows) <= bound
    assert max(relative_error(*pair) for pair in zip(found, expected, strict=True)) <= bound
    assert max(relative_error(ours.metrics[name], of) for name, of in theirs.metrics.items()) <= bound
    assert 0 < ours.metrics["agreement"].sum() < ROWS
    assert not found[1][SHARED:].any() and not found[2][SHARED:].any()


def test_all_classes_as_top_classes_are_all_classes():
    (hidden, weight, bias), taught = problem()
    rows = [linear_divergence(hidden, weight, taught, Divergence(top_k=k), bias).rows for k in (SHARED, None)]
    torch.testing.assert_close(*rows, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient_however_sure_both_are(kind):
    torch.manual_seed(0)
    hidden, weight = (40 * torch.randn(5, HIDDEN)).requires_grad_(), torch.randn(CLASSES, HIDDEN)
    taught = Taught(hidden.detach(), weight, None, CLASSES)
    for top_k in (None, 3):
        term = linear_divergence(hidden, weight, taught, Divergence(kind, top_k=top_k))
        assert term.rows.abs().max() <= 1e-5 and torch.autograd.grad(term.sum, hidden)[0].abs().max() <= 1e-5
        assert term.metrics["agreement"].eq(1).all() and term.metrics["entropy"].isfinite().all()


def test_no_rows_have_a_loss_and_gradients_of_zero():
    (_, weight, bias), taught = problem()
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    nothing = Taught(taught.hidden[:0], taught.weight, taught.bias, SHARED)
    term = linear_divergence(hidden, weight, nothing, Divergence(), bias)
    gradients = torch.autograd.grad(term.sum, [hidden, weight, bias])
    assert (term.count, term.sum.item(), [g.norm().item() for g in gradients]) == (0, 0.0, [0.0] * 3)
    assert {name: len(of) for name, of in term.metrics.items()} == dict.fromkeys(divergence.METRICS, 0)


def test_bfloat16_models_are_compared_in_fp32():
    (hidden, weight, bias), taught = problem(torch.bfloat16)
    ours = linear_divergence(hidden, weight, taught, Divergence(), bias)
    logits = [F.linear(hidden, weight, bias), F.linear(taught.hidden, taught.weight, taught.bias)]
    expected = by_torch(*[x[:, :SHARED].double() for x in logits], Divergence())
    assert ours.sum.dtype == torch.float32 and relative_error(ours.rows, expected.detach()) <= 1e-5


def over_ranks(kind: str, temperature: float, top_k: int | None) -> list[float]:
    """Errors of rows, metrics and gradients where the classes of both heads lie on all ranks."""
    (hidden, weight, bias), taught = problem()
    how = Divergence(kind, temperature, top_k)
    theirs = plain(hidden, weight, bias, taught, how)
    expected = torch.autograd.grad(theirs.sum * 0.125, [hidden, weight, bias])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    cut = [distribute_tensor(t.detach(), mesh, [Shard(0)]) for t in (weight, bias, taught.weight, taught.bias)]
    own = [hidden, *(tensor.requires_grad_() for tensor in cut[:2])]
    ours = linear_divergence(hidden, own[1], Taught(taught.hidden, *cut[2:], SHARED), how, own[2])
    # Only the first rank counts the loss; what a rank has of the hidden states' gradient is its part.
    found = torch.autograd.grad(ours.sum * (0.125 if mesh.get_rank() == 0 else 0.0), own)
    dist.all_reduce(found[0])
    whole = [found[0], *(gradient.full_tensor() for gradient in found[1:])]
    errors = [relative_error(*pair) for pair in zip(whole, expected, strict=True)]
    errors += [relative_error(ours.metrics[name], of) for name, of in theirs.metrics.items()]
    return [relative_error(ours.rows, theirs.rows), *errors]


@pytest.mark.ranks
def test_classes_of_both_that_ranks_share_give_the_loss_and_gradients_of_whole_ones(ranks):
    for case in CASES:
        for errors in ranks.run(over_ranks, *case, timeout_s=60, world=2):
            assert len(errors) == 7 and max(errors) < 1e-5, (case, errors)


@pytest.mark.ranks
def test_a_rank_of_which_no_class_takes_part_needs_no_case_of_its_own(ranks, monkeypatch):
    for errors in ranks.run(with_fewer_classes, timeout_s=60, world=2):
        assert max(errors) < 1e-5, errors


def with_fewer_classes() -> list[float]:
    """Errors where the second rank has only classes that the teacher lacks."""
    (hidden, weight, _), taught = problem()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    cut = [distribute_tensor(t.detach(), mesh, [Shard(0)]) for t in (weight, taught.weight)]
    errors = []
    for how in (Divergence("jsd"), Divergence("jsd", top_k=4)):
        whole = linear_divergence(hidden, weight, Taught(taught.hidden, taught.weight, None, 20), how)
        own = linear_divergence(hidden, cut[0], Taught(taught.hidden, cut[1], None, 20), how)
        errors += [
            relative_error(own.rows, whole.rows),
            relative_error(own.metrics["entropy"], whole.metrics["entropy"]),
        ]
    return errors
