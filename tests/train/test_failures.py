"""One rank fails in the middle of a step: all end within seconds, and the user reads its error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from omnitrain.errors import TrainingError
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.watch.monitor import StallMonitor
from omnitrain.recipe import Recipe
from omnitrain.train.trainer import Trainer
from tests.tiny import tiny_moe_recipe

OVERLAPPED = ["parallel.default.ep=2", "parallel.default.experts.chunks=2", "parallel.default.experts.delay_wgrad=true"]
PLACES = {
    "forward": "forward of foundation, step 3, micro-batch 0, samples",
    "backward": "backward of foundation, step 3, micro-batch 0, samples",
    "optimizer": "optimizer, step 3",
}


class Broken:
    """Raises on rank 1 in the third step, in ``phase``."""

    def __init__(self, trainer: Trainer, phase: str) -> None:
        self._trainer, self._phase = trainer, phase

    def at(self, phase: str) -> None:
        if phase == self._phase and self._trainer.step == 2 and dist.get_rank() == 1:
            raise ValueError("no such expert")


class BrokenActivation(nn.Module):
    def __init__(self, broken: Broken) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, rows: Tensor) -> Tensor:
        self.broken.at("forward")
        active = nn.functional.silu(rows)
        active.register_hook(lambda _: self.broken.at("backward"))
        return active


def fit_and_fail(recipe: Path, overrides: list[str], phase: str) -> None:
    """What a rank raises, and what its watch prints, is in files; its process and connections stay as they are."""
    rank = dist.get_rank()
    trainer = Trainer(Recipe.load(str(recipe), overrides))
    broken = Broken(trainer, phase)
    trainer.model.foundation.model.layers[1].mlp.experts.act_fn = BrokenActivation(broken)
    trainer.optimizer.register_step_pre_hook(lambda *_: broken.at("optimizer"))
    with open(recipe.parent / f"told-{rank}", "w") as stream:
        trainer.watch._stream = stream
        try:
            trainer.fit()
        except ValueError as error:
            (recipe.parent / f"raised-{rank}").write_text("\n".join([str(error), *error.__notes__]))


@pytest.mark.parametrize(
    ("phase", "world"),
    [
        ("forward", 2),
        pytest.param("backward", 2, marks=pytest.mark.second),
        *(pytest.param(phase, 4, marks=pytest.mark.slow) for phase in PLACES),
    ],
)
def test_a_rank_that_fails_in_a_step_ends_those_that_wait_for_it_within_seconds(
    ranks: RankPool, tmp_path: Path, phase: str, world: int
) -> None:
    """It keeps its connections, as a rank that talks over NCCL or is slow to end would."""
    recipe, others = tiny_moe_recipe(tmp_path), [rank for rank in range(world) if rank != 1]
    overrides = [*OVERLAPPED, f"train.packs_per_step={world}"]
    with pytest.raises(RankError) as failure:
        ranks.run(fit_and_fail, recipe, overrides, phase, timeout_s=60, world=world)
    assert sorted(failure.value.ranks) == others
    assert str(failure.value).count("died with exit code 1") == len(others)
    raised, place = (tmp_path / "raised-1").read_text().splitlines()
    assert raised == "no such expert" and place.startswith(f"on rank 1, in {PLACES[phase]}")
    (told,) = filter(None, ((tmp_path / f"told-{rank}").read_text() for rank in others))
    assert told.startswith(f"omnitrain: rank 1 failed in {PLACES[phase]}")
    assert told.endswith(": ValueError: no such expert\n")


def what_ranks_raise(fails_alike: bool) -> tuple[str, str]:
    """Rank 0 fails; its end is what makes rank 1 fail."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == 0:
        StallMonitor(
            dist.HashStore(), 0, 1, None
        )  # of an earlier run: it is no matter on how many runs a rank looks back
    error: Any = None
    try:
        with StallMonitor(store, rank, 2, None) as watch:
            watch.at(step=1, phase="data")
            if fails_alike:
                raise TrainingError("no such data")
            if rank == 0:
                raise KeyError("weight")
            while watch._board.failure() is None:
                torch.ones(1)
            raise RuntimeError("connection closed by peer")
    except Exception as raised:
        error = raised
    return type(error).__name__, str(error)


def test_what_others_meet_when_a_rank_has_failed_does_not_hide_its_error(ranks: RankPool) -> None:
    assert ranks.run(what_ranks_raise, False, timeout_s=30, world=2) == [
        ("KeyError", "'weight'"),
        ("TrainingError", "rank 0 failed in data, step 1: KeyError: 'weight'"),
    ]


def test_an_error_that_all_ranks_agree_on_stays_as_it_is(ranks: RankPool) -> None:
    assert ranks.run(what_ranks_raise, True, timeout_s=30, world=2) == 2 * [("TrainingError", "no such data")]
