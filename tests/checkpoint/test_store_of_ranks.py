from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from omnitrain.checkpoint.store import CheckpointStore, Retention
from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.peers import GlooGroup


def resumed(folder: Path) -> str:
    """The name of the checkpoint that this rank goes on from, or what it is told."""
    with patch("omnitrain.checkpoint.store._TIMEOUT_S", 0.0):
        try:
            return CheckpointStore(folder / f"machine-{dist.get_rank()}").latest(GlooGroup()).name
        except UserError as error:
            return str(error)


def test_all_ranks_go_on_from_the_checkpoint_that_the_first_one_found(ranks: RankPool, tmp_path: Path) -> None:
    """A machine may see a newer folder, or not yet the newest one: then nothing is called damaged."""
    for rank, steps in enumerate(([1, 2], [1, 2, 3])):
        for step in steps:
            CheckpointStore(tmp_path / f"machine-{rank}", Retention(last=3)).save(step, lambda folder: None)
    assert ranks.run(resumed, tmp_path, timeout_s=60, world=2) == ["step-00000002"] * 2
    CheckpointStore(tmp_path / "machine-0", Retention(last=3)).save(4, lambda folder: None)
    first, second = ranks.run(resumed, tmp_path, timeout_s=60, world=2)
    assert "is not the folder of rank 0; every rank writes and reads its shards" in second
    assert first == f"rank 1 failed: {second}"
