from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from omnitrain.checkpoint.optimizer import load_optimizer, save_optimizer
from omnitrain.errors import UserError
from omnitrain.optim.offload import OffloadedOptimizer
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.tensor.apply import shard_matrices
from tests.stored import stored
from tests.whole import whole_tensors


class Tied(nn.Module):
    """Embedding and head are one parameter; ``unused`` never gets a gradient; ``frozen`` is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.unused, self.frozen = nn.Linear(5, 5), nn.LayerNorm(5).requires_grad_(False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.frozen(self.embed(ids)))


class Narrow(nn.Module):
    """Matrices of which two meshes cut the same dim, unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def tied_model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=True)


def train(model: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def require_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def passed_on(make: Callable[[], nn.Module], before: Path, after: Path) -> dict[str, Tensor]:
    """What ``before`` holds, loaded on ranks and written to ``after`` at once. Returns weights, on rank 0."""
    model = make()
    optimizer = optimizer_of(model)
    load_optimizer(model, optimizer, before)
    save_optimizer(model, optimizer, after)
    return whole_tensors(model.state_dict(keep_vars=True), keep=dist.get_rank() == 0)


def sharded() -> nn.Module:
    return fully_shard(tied_model())


def cut_twice() -> nn.Module:
    """Tensor parallelism cuts it, then FSDP shards it."""
    torch.manual_seed(0)
    model = Narrow()
    layout = init_parallel_state(tp_size=2)
    shard_matrices(model, {"up": "colwise", "down": "rowwise"}, layout.tp_mesh)
    return fully_shard(model, mesh=layout.fsdp_mesh)


def test_a_continued_run_updates_bitwise_as_the_uninterrupted_one(tmp_path: Path) -> None:
    model, restored = tied_model(), tied_model()
    optimizer, other = optimizer_of(model), optimizer_of(restored)
    train(model, torch.arange(7), optimizer, 2)
    save_optimizer(model, optimizer, tmp_path)
    assert {name.rpartition(".")[0] for name in stored(tmp_path)} == {"embed.weight"}  # the unused have none
    restored.load_state_dict(whole_tensors(model.state_dict(keep_vars=True)))
    load_optimizer(restored, other, tmp_path)
    train(model, torch.arange(7), optimizer, 1)
    train(restored, torch.arange(7), other, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), restored.parameters(), strict=True))
    assert other.state.keys() == {restored.embed.weight}


def test_an_optimizer_that_has_not_stepped_stays_one(tmp_path: Path) -> None:
    model = tied_model()
    optimizer = optimizer_of(model)
    save_optimizer(model, optimizer, tmp_path)
    load_optimizer(model, optimizer, tmp_path)
    assert not optimizer.state


def test_state_goes_onto_ranks_and_comes_back_bitwise(ranks: RankPool, tmp_path: Path) -> None:
    model = tied_model()
    optimizer = optimizer_of(model)
    train(model, torch.arange(7), optimizer, 2)
    save_optimizer(model, optimizer, tmp_path / "one")
    got, nothing = ranks.run(passed_on, sharded, tmp_path / "one", tmp_path / "two", timeout_s=60, world=2)
    assert not nothing and got["head.weight"].data_ptr() == got["embed.weight"].data_ptr()
    require_equal(got, dict(tied_model().state_dict()))
    require_equal(stored(tmp_path / "one"), stored(tmp_path / "two"))


def test_what_tensor_parallelism_and_sharding_cut_goes_onto_ranks_and_comes_back(
    ranks: RankPool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Narrow()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer = optimizer_of(model)
    train(model, torch.randn(4, 5), optimizer, 1)
    save_optimizer(model, optimizer, tmp_path / "one")
    got = ranks.run(passed_on, cut_twice, tmp_path / "one", tmp_path / "four", timeout_s=60, world=4)[0]
    require_equal(got, weights)
    require_equal(stored(tmp_path / "one"), stored(tmp_path / "four"))


def bytes_on_ranks(folder: Path) -> int:
    """Written by this rank, of two moments of a matrix of 1 MiB of which two ranks have the same half."""
    layout = init_parallel_state(dp_replicate_size=2, dp_shard_size=2)
    model = fully_shard(nn.Linear(512, 512, bias=False), mesh=layout.fsdp_mesh)
    optimizer = optimizer_of(model)
    train(model, torch.ones(1, 512), optimizer, 1)
    save_optimizer(model, optimizer, folder)
    return (folder / f"__{dist.get_rank()}_0.distcp").stat().st_size


def test_each_rank_writes_its_part_and_copies_are_written_once(ranks: RankPool, tmp_path: Path) -> None:
    sizes = ranks.run(bytes_on_ranks, tmp_path, timeout_s=60, world=4)
    assert sizes == pytest.approx([2**19] * 4, rel=0.02)


def refused(folder: Path) -> str:
    """What this rank is told, where rank 1 cannot write its file."""
    model = sharded()
    optimizer = optimizer_of(model)
    train(model, torch.arange(7), optimizer, 1)
    try:
        save_optimizer(model, optimizer, folder)
    except OSError as error:
        return type(error).__name__
    return "written"


def test_where_one_rank_cannot_write_all_raise_its_error(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "__1_0.distcp").mkdir()
    assert ranks.run(refused, tmp_path, timeout_s=60, world=2) == ["IsADirectoryError"] * 2


def offloading(model: nn.Module) -> OffloadedOptimizer:
    parameters = list(model.parameters())
    return OffloadedOptimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-4), [{"params": parameters}], parameters)


def test_what_low_precision_weights_round_away_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    straight = Narrow().bfloat16()
    resumed = pickle.loads(pickle.dumps(straight))
    inputs = torch.randn(4, 5, dtype=torch.bfloat16)
    train(straight, inputs, offloading(straight), 4)
    before = offloading(resumed)
    train(resumed, inputs, before, 2)
    save_optimizer(resumed, before, tmp_path)
    after = offloading(resumed)
    load_optimizer(resumed, after, tmp_path)
    train(resumed, inputs, after, 2)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("goes_on_with", [optimizer_of, offloading])
def test_weights_that_are_fp32_from_now_on_are_those_that_were_rounded_to_be_saved(
    tmp_path: Path, goes_on_with: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    torch.manual_seed(0)
    low = Narrow().bfloat16()
    before = offloading(low)
    train(low, torch.randn(4, 5, dtype=torch.bfloat16), before, 2)
    save_optimizer(low, before, tmp_path)
    model = pickle.loads(pickle.dumps(low)).float()
    after = goes_on_with(model)
    load_optimizer(model, after, tmp_path)
    masters = before.state_dict()["masters"].values()
    assert not any(torch.equal(master, weight) for master, weight in zip(masters, low.parameters(), strict=True))
    assert all(torch.equal(master, weight) for master, weight in zip(masters, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.Adafactor, lr=0.1),
    ],
)
def test_other_optimizers_go_on_bitwise(tmp_path: Path, make: Callable[..., torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model, inputs = Narrow(), torch.randn(4, 5)
    optimizer = make(model.parameters())
    train(model, inputs, optimizer, 2)
    save_optimizer(model, optimizer, tmp_path)
    resumed = pickle.loads(pickle.dumps(model))
    after = make(resumed.parameters())
    load_optimizer(resumed, after, tmp_path)
    train(model, inputs, optimizer, 1)
    train(resumed, inputs, after, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


class CountingSteps(torch.optim.SGD):
    """Counts in a number that is no tensor."""

    def step(self, closure: None = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1


def test_what_an_optimizer_keeps_as_a_number_goes_on_too(tmp_path: Path) -> None:
    model = Narrow()
    optimizer = CountingSteps(model.parameters(), momentum=0.9)
    train(model, torch.randn(4, 5), optimizer, 3)
    save_optimizer(model, optimizer, tmp_path)
    after = CountingSteps(model.parameters(), momentum=0.9)
    load_optimizer(model, after, tmp_path)
    assert [state["steps"] for state in after.state.values()] == [3] * 4


def test_the_state_of_other_parameters_is_refused_with_their_names(tmp_path: Path) -> None:
    model = Narrow()
    optimizer = optimizer_of(model)
    train(model, torch.randn(4, 5), optimizer, 1)
    save_optimizer(model, optimizer, tmp_path)
    with pytest.raises(
        UserError, match=r"state of 4 parameters .*, such as down.bias, down.weight, up.bias; make the optimizer"
    ):
        load_optimizer(nn.ModuleDict({"inner": model}), optimizer, tmp_path)


def test_state_of_another_shape_and_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    model = Narrow()
    optimizer = optimizer_of(model)
    train(model, torch.randn(4, 5), optimizer, 1)
    save_optimizer(model, optimizer, tmp_path)
    model.down = nn.Linear(6, 9)
    with pytest.raises(UserError, match=r"has 4 tensors that do not fit .* down.weight.exp_avg \(7, 6\) for \(9, 6\)"):
        load_optimizer(model, optimizer_of(model), tmp_path)
    with pytest.raises(UserError, match=r"2 parameters that are not the model's, .* \(7, 6\), \(7,\); make it from"):
        save_optimizer(model, optimizer, tmp_path)


def test_what_could_not_be_read_again_is_refused_before_it_is_written(tmp_path: Path) -> None:
    model = Narrow()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.up.weight] = {"past": [torch.ones(6, 5)], "a.b": 1}
    with pytest.raises(UserError, match=r"SGD cannot be saved: found up.weight.past, a list; up.weight.a.b, a"):
        save_optimizer(model, optimizer, tmp_path)
    assert not any(tmp_path.iterdir())


def test_state_that_replaces_an_earlier_one_is_none_before_it_is_complete(tmp_path: Path) -> None:
    model = Narrow()
    optimizer = optimizer_of(model)
    train(model, torch.randn(4, 5), optimizer, 1)
    save_optimizer(model, optimizer, tmp_path)
    with patch.object(dcp.FileSystemWriter, "finish", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        save_optimizer(model, optimizer, tmp_path)
    with pytest.raises(UserError, match="no optimizer state"):
        load_optimizer(model, optimizer, tmp_path)


def of_parts_and_behind_an_evaluation(folder: Path) -> str:
    """State by the part of this rank would be taken for all of it; what a forward gathered is sharded again."""
    model = fully_shard(Narrow(), reshard_after_forward=False)
    optimizer = optimizer_of(model)
    train(model, torch.ones(1, 5), optimizer, 1)
    with torch.no_grad():
        model(torch.ones(1, 5))
    save_optimizer(model, optimizer, folder)
    load_optimizer(model, optimizer, folder)
    for state in optimizer.state.values():
        state["part"] = state["exp_avg"].to_local()
    with pytest.raises(UserError) as caught:
        save_optimizer(model, optimizer, folder)
    return str(caught.value)


def test_state_that_does_not_lie_as_its_parameter_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(of_parts_and_behind_an_evaluation, tmp_path, timeout_s=60, world=2)
    assert "found up.weight.part, a Tensor of (3, 5) for a DTensor; " in first
    assert "down.weight.part, a Tensor of (3, 6) for a DTensor (4 in total); expected numbers, and" in second


def test_a_folder_without_state_is_named(tmp_path: Path) -> None:
    model = tied_model()
    with pytest.raises(UserError, match=r"no optimizer state in .*; expected a folder that save_optimizer wrote"):
        load_optimizer(model, optimizer_of(model), tmp_path)
