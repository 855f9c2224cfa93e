"""Two passes run in turn: in an order that only their waits decide, with generators of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from omnitrain.ops.loss.cross_entropy import linear_cross_entropy
from omnitrain.ops.turns import give_turn, run_in_turns, running_thread
from omnitrain.parallel.spawn.pool import RankPool
from tests import device_thread

CPU = torch.device("cpu")


def backward_of(*steps: Callable[[], None]) -> Callable[[], None]:
    """A backward that runs the steps inside autograd, and gives its turn after each but the last."""

    class Steps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            run_steps(*steps)
            return gradient

    return Steps.apply(torch.ones((), requires_grad=True)).backward


def run_steps(*steps: Callable[[], None]) -> None:
    for number, step in enumerate(steps):
        if number:
            give_turn()
        step()


def test_passes_alternate_at_their_waits_and_the_longer_one_ends_alone() -> None:
    order: list[str] = []
    forward = [lambda n=n: order.append(f"F{n}") for n in range(2)]
    backward = [lambda n=n: order.append(f"B{n}") for n in range(4)]
    run_in_turns(lambda: run_steps(*forward), backward_of(*backward), CPU, draws=False)
    assert order == ["B0", "F0", "B1", "F1", "B2", "B3"]


def test_one_can_see_which_thread_has_its_turn_and_without_a_pair_nobody_waits() -> None:
    seen: list[bool] = []

    def see() -> None:
        seen.append(running_thread() == threading.get_ident())

    give_turn()
    assert running_thread() is None
    run_in_turns(lambda: run_steps(see, see), backward_of(see, see, see), CPU, draws=False)
    assert seen == [True] * 5
    assert running_thread() is None


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_an_error_of_one_pass_ends_the_other_at_its_next_wait_and_is_raised(failing: str) -> None:
    order: list[str] = []

    def fail() -> None:
        raise ValueError("here")

    good = [lambda n=n: order.append(f"{n}") for n in range(3)]
    steps = {"forward": good, "backward": good} | {failing: [lambda: None, fail]}
    with pytest.raises(ValueError, match="here"):
        run_in_turns(lambda: run_steps(*steps["forward"]), backward_of(*steps["backward"]), CPU, draws=False)
    assert order == (["0", "1"] if failing == "forward" else ["0"])
    assert "backward" not in {thread.name for thread in threading.enumerate()}
    run_in_turns(lambda: None, backward_of(lambda: order.append("again")), CPU, draws=False)
    assert order[-1] == "again"


def test_each_pass_draws_the_numbers_that_it_would_draw_alone() -> None:
    drawn: dict[str, list[float]] = {"F": [], "B": []}

    def steps(name: str, seed: int) -> list[Callable[[], None]]:
        draw = [lambda: drawn[name].append(torch.rand(()).item()) for _ in range(3)]
        return [lambda: torch.manual_seed(seed) and None, *draw]

    run_in_turns(lambda: run_steps(*steps("F", 1)), backward_of(*steps("B", 2)), CPU, draws=True)
    for name, seed in (("F", 1), ("B", 2)):
        generator = torch.Generator().manual_seed(seed)
        assert drawn[name] == [torch.rand((), generator=generator).item() for _ in range(3)]


def test_a_users_loss_differentiates_in_a_pair_although_autograd_has_one_worker_for_a_gpu(fresh_rank: RankPool) -> None:
    found = fresh_rank.run(pair_with_the_loss_of_a_user, timeout_s=20)
    assert found == [(["B0", "F0", "B1", "B2"], [0.5, 0.5], True)]


def pair_with_the_loss_of_a_user() -> tuple[list[str], list[float], bool]:
    """What ran in which order, the gradient by the hidden states, and whether a plain backward runs in the worker."""
    device_thread.install()
    order, threads = list[str](), list[int]()
    hidden, weight = torch.tensor([[1.0, 1.0]], requires_grad=True), torch.ones(3, 2)
    losses: list[Tensor] = []

    def head() -> None:
        order.append("F0")
        loss = linear_cross_entropy(hidden, weight, torch.tensor([0]), function=lambda x, _: x.mean(-1) / 2)
        losses.append(loss.sum)

    backward = [lambda n=n: order.append(f"B{n}") for n in range(3)]
    run_in_turns(head, backward_of(*backward), CPU, draws=False)
    losses[0].backward()
    backward_of(lambda: threads.append(threading.get_ident()))()
    assert hidden.grad is not None
    return order, hidden.grad[0].tolist(), threads != [threading.get_ident()]
