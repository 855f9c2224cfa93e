import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from omnitrain.errors import UserError
from omnitrain.optim.adamw import learning_rate
from omnitrain.optim.build import build_optimizer
from omnitrain.optim.gradients import Holders, clip_gradients, gradient_norm, remember_holders
from omnitrain.recipe import Optimizer

ROOT = Path(__file__).parents[2]


def parameters() -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    made[0].grad, made[1].grad = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([0.0, 4.0])
    return made


def test_norm_is_over_all_elements_and_missing_gradients_count_zero() -> None:
    assert gradient_norm(parameters()).item() == 5.0
    assert gradient_norm([]).item() == 0.0


def test_the_norm_of_a_large_tensor_has_the_digits_of_its_result() -> None:
    large = torch.nn.Parameter(torch.zeros(2**22))
    large.grad = torch.randn(2**22, generator=torch.Generator().manual_seed(0))
    assert gradient_norm([large]).item() == pytest.approx(large.grad.double().norm().item(), rel=2e-7)


def test_clipping_scales_to_the_bound_and_returns_the_norm_before() -> None:
    owners = parameters()
    assert clip_gradients(owners, 1.0).item() == 5.0
    assert abs(gradient_norm(owners).item() - 1.0) < 1e-6
    assert clip_gradients(owners, 10.0).item() == gradient_norm(owners).item()


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_a_bound_that_would_turn_or_end_gradients_is_refused(bound: float) -> None:
    with pytest.raises(UserError, match=r"max_norm: found .*; expected a norm above 0"):
        clip_gradients(parameters(), bound)


def test_one_parameter_by_itself_is_one_parameter() -> None:
    assert clip_gradients(parameters()[0], None).item() == gradient_norm(parameters()[0]).item() == 3.0


def test_nothing_else_clips() -> None:
    """torch's own fail on parameters of several meshes, or count replicas."""
    others = ["clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_", "get_total_norm"]
    patterns = [argument for name in others for argument in ("-e", name)]
    found = subprocess.run(
        ["git", "grep", "-n", *patterns, "--", "omnitrain", "tasks"], cwd=ROOT, capture_output=True, text=True
    )
    assert (found.stdout, found.stderr) == ("", "")


@pytest.mark.parametrize(("schedule", "quarter"), [("cosine", 0.1 + 0.9 * (2 + 2**0.5) / 4), ("linear", 0.775)])
def test_schedule_warms_up_and_ends_at_the_final_ratio(schedule: str, quarter: float) -> None:
    settings = Optimizer(learning_rate=1.0, warmup_steps=10, schedule=schedule, final_ratio=0.1)
    rates = [learning_rate(step, 110, settings, settings.learning_rate) for step in range(111)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[10] == 1.0 and abs(rates[35] - quarter) < 1e-9
    assert abs(rates[110] - 0.1) < 1e-9 and rates[10:] == sorted(rates[10:], reverse=True)


def test_every_fp32_weight_near_one_moves_at_a_small_rate() -> None:
    model = torch.nn.Linear(10, 10, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = build_optimizer(model, Optimizer(learning_rate=1e-5, weight_decay=0.0))
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert (model.weight != 1).all()
    assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())


def test_ranks_without_trained_weights_add_up_where_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section that is frozen on a GPU has no gradient there; its part of the sum must be there all the same."""
    devices: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda total, group: devices.append(total.device.type))
    model = torch.nn.ParameterDict({"frozen": torch.zeros(2), "of_main": torch.zeros(2, device="meta")})
    model.frozen.requires_grad_(False)
    remember_holders(model, Holders(sections=object(), device="meta"))  # in place of a GPU
    gradient_norm(model.parameters())
    assert devices == ["meta"]


def test_a_spread_model_and_other_parameters_have_one_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four stages have the gradients of the spread model's own part; what lies beside it is on each of them."""
    monkeypatch.setattr(dist, "all_reduce", lambda total, group: total.mul_(4))
    whole, spread, elsewhere = parameters()[0], parameters()[0], parameters()[1]
    model = torch.nn.ParameterList([spread, elsewhere])
    remember_holders(model, Holders(stages=object(), counted_elsewhere=frozenset([elsewhere])))
    assert gradient_norm([whole, *model]).item() ** 2 == pytest.approx(3.0**2 + 4 * 3.0**2)
    assert gradient_norm([whole]).item() == 3.0 and gradient_norm([spread]).item() == 6.0
