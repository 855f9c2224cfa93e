"""AdamW with moments of 8 bits; `make test-low-bit` installs torchao for these."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from omnitrain.checkpoint.optimizer import load_optimizer, save_optimizer
from omnitrain.errors import UserError
from omnitrain.optim.adamw import local_shard
from omnitrain.optim.build import build_optimizer
from omnitrain.optim.ema import AveragedWeights
from omnitrain.optim.low_bit import AdamW8bit
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Optimizer
from tests.stored import stored

pytestmark = pytest.mark.slow
SETTINGS = Optimizer(learning_rate=1e-2, state="int8")


def model_of_two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256, bias=False), nn.Tanh(), nn.Linear(256, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        inputs = torch.randn(16, 128, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    return [optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]


def test_large_tensors_have_moments_of_8_bits_and_move_nearly_as_with_32() -> None:
    model, precise = model_of_two_layers(), model_of_two_layers()
    optimizer = build_optimizer(model, SETTINGS)
    assert isinstance(optimizer, AdamW8bit)
    train(model, optimizer, 20)
    train(precise, build_optimizer(precise, Optimizer(learning_rate=1e-2)), 20)
    for kept in moments(optimizer, model[0].weight):
        assert (kept.codes.dtype, kept.codes.numel(), kept.scale.numel()) == (torch.uint8, 128 * 256, 128)
    assert all(moment.dtype == torch.float32 for moment in moments(optimizer, model[2].bias))
    start = model_of_two_layers()
    for weight, other, before in zip(*(m.parameters() for m in (model, precise, start)), strict=True):
        assert (weight - other).norm() < 0.1 * (other - before).norm()


def test_a_run_resumes_with_the_same_8_bit_values(tmp_path: Path) -> None:
    model, resumed = model_of_two_layers(), model_of_two_layers()
    optimizer, other = build_optimizer(model, SETTINGS), build_optimizer(resumed, SETTINGS)
    train(model, optimizer, 3)
    save_optimizer(model, optimizer, tmp_path)
    assert all(tensor.dtype == torch.float32 for tensor in stored(tmp_path).values())
    resumed.load_state_dict(model.state_dict())
    load_optimizer(resumed, other, tmp_path)
    for kept, loaded in zip(moments(optimizer, model[0].weight), moments(other, resumed[0].weight), strict=True):
        assert torch.equal(kept.codes, loaded.codes)
        torch.testing.assert_close(kept.scale, loaded.scale, rtol=1e-6, atol=0)
    train(model, optimizer, 3, first=3)
    train(resumed, other, 3, first=3)
    for weight, wanted in zip(resumed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(weight, wanted, rtol=1e-4, atol=1e-6)


def test_averages_follow_weights_whose_moments_have_8_bits() -> None:
    model = model_of_two_layers()
    optimizer = build_optimizer(model, SETTINGS)
    ema, by_hand = AveragedWeights(optimizer, 0.9), [weight.detach().double() for weight in model.parameters()]
    for step in range(3):
        train(model, optimizer, 1, first=step)
        ema.step()
        weights = model.parameters()
        by_hand = [0.9 * average + 0.1 * weight.detach() for average, weight in zip(by_hand, weights, strict=True)]
    for weight, average in zip(model.parameters(), by_hand, strict=True):
        torch.testing.assert_close(ema.state[weight]["average"].double(), average, rtol=0, atol=1e-6)


def on_ranks(before: Path, after: Path) -> float:
    """Moments of one process, loaded on shards and saved again; then it trains."""
    model = fully_shard(model_of_two_layers())
    optimizer = build_optimizer(model, SETTINGS)
    load_optimizer(model, optimizer, before)
    save_optimizer(model, optimizer, after)
    train(model, optimizer, 1)
    return max(local_shard(p.detach()).abs().max().item() for p in model.parameters())


def test_8_bit_moments_go_onto_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Half a matrix has whole blocks of it, so its values stay."""
    model = model_of_two_layers()
    optimizer = build_optimizer(model, SETTINGS)
    train(model, optimizer, 2)
    save_optimizer(model, optimizer, tmp_path / "one")
    assert all(
        0 < largest < 10 for largest in ranks.run(on_ranks, tmp_path / "one", tmp_path / "two", timeout_s=60, world=2)
    )
    one, two = stored(tmp_path / "one"), stored(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-6, atol=0, msg=name)


def test_what_8_bit_states_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="`state: int8` with `kind: muon`"):
        Optimizer(kind="muon", state="int8")
    model = model_of_two_layers()
    with pytest.raises(UserError, match=r"found 'int8' with `memory.offload: .optimizer.` of a plan"):
        build_optimizer(model, SETTINGS, offloaded=list(model.parameters()))
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"'int8' needs torchao .*pip install 'omnitrain\[low-bit\]'"):
        build_optimizer(model, SETTINGS)
