from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from omnitrain.ops.loss import cross_entropy, linear
from omnitrain.ops.loss.cross_entropy import IGNORED, cross_entropy_rows, linear_cross_entropy
from omnitrain.ops.loss.linear import LossTerm
from omnitrain.ops.loss.token_functions import further_parameters
from omnitrain.ops.registry import Backend, choose

ROWS, CLASSES, HIDDEN = 23, 50, 16


def problem(ignored: float = 0.3, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(ROWS, HIDDEN), torch.randn(CLASSES, HIDDEN), torch.randn(CLASSES)
    labels = torch.randint(0, CLASSES, (ROWS,)).masked_fill(torch.rand(ROWS) < ignored, IGNORED)
    return (*(x.to(dtype).requires_grad_() for x in (hidden, weight, bias)), labels)


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None):
    rows = F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, reduction="none", ignore_index=IGNORED)
    return LossTerm(rows.sum(), int((labels != IGNORED).sum()), rows)


def gradients(term: LossTerm, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(term.sum * 0.125, inputs))


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("chunk_rows", [1, 7, 8, ROWS, 100])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
@pytest.mark.parametrize("with_bias", [True, False])
def test_loss_and_gradients_are_those_of_plain_cross_entropy(chunk_rows, ignored, with_bias):
    hidden, weight, bias, labels = problem(ignored)
    inputs, bias = ([hidden, weight, bias], bias) if with_bias else ([hidden, weight], None)
    ours = linear_cross_entropy(hidden, weight, labels, bias, chunk_elements=chunk_rows * CLASSES)
    theirs = plain(hidden, weight, labels, bias)
    assert ours.count == theirs.count and not ours.rows.requires_grad
    torch.testing.assert_close(ours.rows, theirs.rows.detach())
    assert relative_error(ours.sum, theirs.sum) <= 1e-6
    for mine, other in zip(gradients(ours, *inputs), gradients(theirs, *inputs), strict=True):
        assert relative_error(mine, other) <= 1e-6


@pytest.mark.second
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_softmax_is_as_exact(dtype):
    *inputs, labels = problem(dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    true = F.cross_entropy(F.linear(*exact), labels, reduction="sum", ignore_index=IGNORED)
    plainly = linear_cross_entropy(*inputs[:2], labels, inputs[2], chunk_elements=4 * CLASSES, backend="torch")
    ours = linear_cross_entropy(*inputs[:2], labels, inputs[2], chunk_elements=4 * CLASSES, backend="compiled")
    torch.testing.assert_close(ours.rows, plainly.rows)
    errors = [
        [relative_error(mine.double(), right) for mine, right in zip(gradients(term, *inputs), of_true, strict=True)]
        for of_true in [torch.autograd.grad(true * 0.125, exact)]
        for term in (ours, plainly)
    ]
    assert all(mine <= max(1.05 * other, 1e-6) for mine, other in zip(*errors, strict=True))


@pytest.mark.parametrize("label", [CLASSES, -1])
@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_a_label_out_of_range_is_refused(label, backend):
    hidden, weight, _, labels = problem()
    with pytest.raises(RuntimeError, match=r"out of (range|bounds)"):
        linear_cross_entropy(hidden, weight, torch.full_like(labels, label), backend=backend)


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_memory_for_logits_has_a_bound(backend, monkeypatch):
    rows: list[int] = []
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", 5 * CLASSES * 4)
    monkeypatch.setattr(linear, "linear", lambda h, *_, out: rows.append(len(h)) or out.zero_())
    *inputs, labels = problem(ignored=0.0)
    linear_cross_entropy(*inputs[:2], labels, backend=backend)
    assert rows[:2] == ([2, 2] if backend == "torch" else [5, 5])  # fp32, with a copy and without


def test_auto_is_the_first_that_can_run_here():
    cuda = torch.device("cuda")
    lacks = Backend("a", print, lambda device: "lacks something", automatic=("cuda",))
    assert choose("x", [lacks, Backend("b", print)], "auto", cuda).name == "b"
    assert choose("x", [replace(lacks, missing=lambda device: None), Backend("b", print)], "auto", cuda).name == "a"
    assert choose("cross_entropy", cross_entropy.CROSS_ENTROPY, "auto", torch.device("cpu")).name == "torch"


def test_more_logits_than_a_chunk_holds_never_exist(monkeypatch):
    made: list[int] = []
    log_softmax = torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda x, *a, **k: made.append(x.numel()) or log_softmax(x, *a, **k))
    hidden, weight, _, labels = problem(ignored=0.5)
    linear_cross_entropy(hidden, weight, labels, chunk_elements=4 * CLASSES)
    assert max(made) <= 4 * CLASSES
    assert sum(made) == (labels != IGNORED).sum() * CLASSES  # ignored rows have no logits


@pytest.mark.parametrize("rows", [0, ROWS])
def test_no_label_gives_zero_loss_and_zero_gradients(rows):
    hidden, weight, bias, _ = problem()
    hidden = torch.full((rows, HIDDEN), torch.nan, requires_grad=True)
    term = linear_cross_entropy(hidden, weight, torch.full((rows,), IGNORED), bias)
    assert term.sum == 0 and term.count == 0 and term.rows.tolist() == [0] * rows
    assert all(grad.count_nonzero() == 0 for grad in gradients(term, hidden, weight, bias))


def test_tied_weight_gets_both_gradients():
    torch.manual_seed(0)
    ids, labels = torch.randint(0, CLASSES, (ROWS,)), torch.randint(0, CLASSES, (ROWS,))
    table = nn.Embedding(CLASSES, HIDDEN)
    ours, theirs = (
        gradients(loss(table(ids), table.weight, labels), table.weight)[0] for loss in (linear_cross_entropy, plain)
    )
    assert relative_error(ours, theirs) <= 1e-6


def test_bf16_gradients_are_as_exact_as_those_of_the_plain_loss():
    exact = [x.double() for x in problem()[:3]]
    labels = problem()[3]
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    true = torch.autograd.grad(
        F.cross_entropy(F.linear(*exact), labels, reduction="sum", ignore_index=IGNORED) * 0.125, exact
    )
    hidden, weight, bias = rounded
    ours = gradients(linear_cross_entropy(hidden, weight, labels, bias, chunk_elements=4 * CLASSES), *rounded)
    theirs = gradients(plain(hidden, weight, labels, bias), *rounded)
    for mine, other, right in zip(ours, theirs, true, strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative_error(mine.double(), right) <= 1.2 * relative_error(other.double(), right)


@pytest.mark.parametrize("trained", ["hidden", "weight", "nothing"])
def test_what_does_not_train_gets_no_gradient_and_no_buffer(trained, monkeypatch):
    hidden, weight, bias, labels = problem()
    shapes: list[tuple[int, ...]] = []
    zeros_like = torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda x, **k: shapes.append(tuple(x.shape)) or zeros_like(x, **k))
    for name, tensor in {"hidden": hidden, "weight": weight, "bias": bias}.items():
        tensor.requires_grad_(name == trained)
    term = linear_cross_entropy(hidden, weight, labels, bias)
    assert shapes == {"hidden": [(ROWS, HIDDEN)], "weight": [(CLASSES, HIDDEN)], "nothing": []}[trained]
    assert term.sum.requires_grad == (trained != "nothing")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_makes_no_gradients(mode, monkeypatch):
    monkeypatch.setattr(torch, "zeros_like", pytest.fail)
    hidden, weight, _, labels = problem()
    with mode():
        term = linear_cross_entropy(hidden, weight, labels)
    assert not term.sum.requires_grad
    assert relative_error(term.sum, plain(hidden, weight, labels).sum) <= 1e-6


def test_recompute_gives_the_same_gradients():
    hidden, weight, _, labels = problem()
    inputs = (hidden, weight)
    direct = torch.autograd.grad(linear_cross_entropy(hidden.tanh(), weight, labels).sum, inputs)
    again = checkpoint(lambda h, w: linear_cross_entropy(h.tanh(), w, labels).sum, *inputs, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(direct, torch.autograd.grad(again, inputs), strict=True))


def test_differentiating_twice_or_again_is_refused():
    hidden, weight, _, labels = problem()
    total = linear_cross_entropy(hidden, weight, labels).sum
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(total, hidden, create_graph=True)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        total.backward()


def test_plain_form_has_the_same_sum_count_and_rows():
    hidden, weight, _, labels = problem()
    ours, fused = cross_entropy_rows(hidden @ weight.T, labels), linear_cross_entropy(hidden, weight, labels)
    assert ours.count == fused.count and not ours.rows.requires_grad
    torch.testing.assert_close(ours.rows, fused.rows)
    assert relative_error(gradients(ours, hidden)[0], gradients(fused, hidden)[0]) <= 1e-6


def shared_vocabulary(with_bias: bool, chunk_rows: int) -> list[float]:
    """Errors of the loss, its rows and the gradients of a head whose classes lie on all ranks."""
    hidden, weight, bias, labels = problem()
    given = (hidden, weight, bias if with_bias else None)
    theirs = plain(hidden, weight, labels, given[2])
    expected = gradients(theirs, *(tensor for tensor in given if tensor is not None))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    cut = [distribute_tensor(t.detach(), mesh, [Shard(0)]) for t in given[1:] if t is not None]
    own = [hidden, *(tensor.requires_grad_() for tensor in cut)]
    bias = own[2] if with_bias else None
    ours = linear_cross_entropy(hidden, own[1], labels, bias, chunk_elements=chunk_rows * CLASSES)
    # Only the first rank counts the loss; what a rank has of the hidden states' gradient is its part.
    found = torch.autograd.grad(ours.sum * (0.125 if mesh.get_rank() == 0 else 0.0), own)
    dist.all_reduce(found[0])
    whole = [found[0], *(gradient.full_tensor() for gradient in found[1:])]
    pairs = [(ours.sum, theirs.sum), (ours.rows, theirs.rows), *zip(whole, expected, strict=True)]
    return [relative_error(mine.detach(), other.detach()) for mine, other in pairs]


@pytest.mark.parametrize(("with_bias", "chunk_rows"), [(True, 7), (False, ROWS)])
def test_a_vocabulary_shared_by_ranks_gives_the_loss_and_gradients_of_a_whole_one(ranks, with_bias, chunk_rows):
    for errors in ranks.run(shared_vocabulary, with_bias, chunk_rows, timeout_s=60, world=2):
        assert len(errors) == 4 + with_bias and max(errors) < 1e-6, errors


def ignored_and_out_of_range() -> list[float | str]:
    hidden, weight, _, labels = problem()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    own = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    nothing = linear_cross_entropy(hidden, own, torch.full_like(labels, IGNORED))
    found: list[float | str] = [nothing.sum.item(), *(g.norm().item() for g in gradients(nothing, hidden))]
    for label in (CLASSES, -1):
        try:
            linear_cross_entropy(hidden, own, torch.full_like(labels, label))
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_a_shared_vocabulary_ignores_labels_and_refuses_those_out_of_range(ranks):
    for loss, gradient, *errors in ranks.run(ignored_and_out_of_range, timeout_s=60, world=2):
        assert loss == 0 and gradient == 0 and ["a label is out of range" in error for error in errors] == [True] * 2


def test_a_function_reads_what_its_parameters_after_logits_and_labels_name():
    def after_any(*args, big, small=None): ...
    def by_keyword(logits, *, labels, big): ...
    def positional(logits, labels, big, /): ...

    assert further_parameters(after_any) == {"big": False, "small": True}
    assert further_parameters(by_keyword) == {"labels": False, "big": False}
    assert further_parameters(partial(lambda logits, labels, weight, big: ..., weight=2.0)) == {
        "weight": True,
        "big": False,
    }
    assert further_parameters(positional) == {}
    assert further_parameters(F.cosine_similarity) == {}  # compiled, without a signature
