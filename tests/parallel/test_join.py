"""Variables that a launcher left behind: a process that waits for ranks says for whom, and what to unset."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from omnitrain.errors import TrainingError, UserError
from omnitrain.parallel import join
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import forget_parallel_state, init_parallel_state, leave_process_groups


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {"RANK": f"{rank}", "WORLD_SIZE": f"{world_size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}


@pytest.mark.parametrize(
    ("rank", "world_size", "missing"),
    [(0, 2, "rank 1"), (1, 2, "rank 0"), (0, 20, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more")],
)
def test_a_process_that_is_alone_says_for_which_ranks_it_waits_and_what_to_unset(
    rank: int, world_size: int, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    monkeypatch.setattr(join, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(join, "default_pg_timeout", timedelta(seconds=0.2))
    with patch.dict(os.environ, environment(rank, world_size, port)), pytest.raises(TrainingError) as ended:
        join.join_process_group("gloo")
    expected = (
        f"rank {rank} of {world_size} waits at 127.0.0.1:{port} for {missing}. RANK and WORLD_SIZE are set; if no "
        "launcher started ranks, `unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT`"
    )
    assert str(ended.value) == expected and capsys.readouterr().err == f"omnitrain: {expected}\n"


def test_variables_without_an_address_are_refused_and_one_rank_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = r"WORLD_SIZE is set, but not RANK, MASTER_ADDR, MASTER_PORT; if no .*, `unset WORLD_SIZE`"
    with pytest.raises(UserError, match=told):
        init_parallel_state()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert init_parallel_state().world_size == 1
    forget_parallel_state()
    dist.destroy_process_group()


def joined(port: int, late_s: float, silent_s: float, launcher: Mapping[str, str] = {}) -> tuple[float, str]:
    """The sum over both ranks, and what this one printed; the second comes late. ``launcher``: its variables."""
    rank, added = dist.get_rank(), torch.ones(())
    dist.barrier()  # a rank that leaves would end the connections that the other still opens
    leave_process_groups()
    time.sleep(late_s * rank)
    with (
        patch.dict(os.environ, {**environment(rank, 2, port), **launcher}),
        patch.object(join, "SILENT_SECONDS", 10.0 if rank else silent_s),
        contextlib.redirect_stderr(io.StringIO()) as printed,
    ):
        join.join_process_group("gloo")
    dist.all_reduce(added)
    return added.item(), printed.getvalue()


def test_ranks_that_come_find_each_other_and_only_late_ones_are_named(ranks: RankPool) -> None:
    assert ranks.run(joined, free_port(), 0.0, 10.0, timeout_s=30, world=2) == [(2, "")] * 2
    (added, told), second = ranks.run(joined, free_port(), 0.7, 0.2, timeout_s=30, world=2)
    assert added == 2 and second == (2, "") and "rank 0 of 2 waits at 127.0.0.1:" in told and "for rank 1. RANK" in told


def test_ranks_that_torchrun_starts_again_wait_for_each_other_again(ranks: RankPool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # that of torchrun, which goes on
    for attempt in "01":
        of_agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": attempt}
        first, second = ranks.run(joined, store.port, 0.7, 0.2, of_agent, timeout_s=30, world=2)
        assert first[0] == 2 and "for rank 1. RANK" in first[1] and second == (2, "")


def test_a_rank_whose_gpu_another_rank_has_ends_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(store: dist.Store, rank: int) -> None:
        raise UserError(f"ranks 1 and {rank} have the same GPU")

    monkeypatch.setattr(join, "require_own_gpu", taken)
    monkeypatch.setattr(join, "default_pg_timeout", timedelta(seconds=0.2))
    with patch.dict(os.environ, environment(0, 2, free_port())), pytest.raises(UserError, match="ranks 1 and 0"):
        join.join_process_group("cpu:gloo,cuda:nccl")
