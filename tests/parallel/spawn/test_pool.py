import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from omnitrain.errors import UserError
from omnitrain.parallel.spawn.pool import RankError, RankPool

ROOT = Path(__file__).parents[3]


def add_up(value: float) -> tuple[int, float]:
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise UserError(f"no image on rank {rank}")
    dist.barrier()


def skip_a_collective_on(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def hang() -> None:
    threading.Event().wait()


def process_id() -> int:
    return os.getpid()


def leave_a_collective_unfinished() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def gather_whole(size: int) -> None:
    tensor = distribute_tensor(torch.ones(size), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    (2 * tensor + tensor.sum()).full_tensor()


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def doubled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: 2 * tensor for name, tensor in tensors.items()}


def unpicklable() -> object:
    return threading.Lock()


def assert_gone(process_ids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while alive := [pid for pid in process_ids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.01)


def assert_next_case_passes(ranks: RankPool) -> None:
    assert ranks.run(add_up, 1.0, timeout_s=30) == [(rank, 10.0) for rank in range(4)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_returns_its_result(ranks: RankPool, world: int) -> None:
    expected = [(rank, 10.0 * world + sum(range(world))) for rank in range(world)]
    assert ranks.run(add_up, 10.0, timeout_s=30, world=world) == expected
    assert ranks.run(f"{__name__}:add_up", 10.0, timeout_s=30, world=world) == expected


def test_worlds_of_any_size_share_the_same_processes(ranks: RankPool) -> None:
    four = ranks.run(process_id, timeout_s=30)
    assert len({os.getpid(), *four}) == 5
    for world in (1, 2, 4):
        assert ranks.run(process_id, timeout_s=30, world=world) == four[:world]


def test_processes_of_a_rank_start_as_those_of_any_other_process(ranks: RankPool) -> None:
    """By a fork server, as the ranks themselves, every data process would import torch anew."""
    found = ranks.run(multiprocessing.get_start_method, timeout_s=30, world=1)
    assert found == [multiprocessing.get_start_method()]


def test_tensors_go_and_come_back_by_value(ranks: RankPool) -> None:
    tensors = {
        "bf16": torch.arange(3).bfloat16(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.ones(0),
    }
    result = ranks.run(doubled, tensors, timeout_s=30, world=1)[0]
    assert {name: tensor.tolist() for name, tensor in result.items()} == {
        "bf16": [0.0, 2.0, 4.0],
        "parameter": [2.0, 2.0],
        "empty": [],
    }
    assert not result["bf16"].is_shared()


def test_a_rank_that_raises_fails_the_case_by_name(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 2 raised omnitrain.errors.UserError: no image on rank 2") as caught:
        ranks.run(raise_on, 2, timeout_s=30)
    assert caught.value.ranks == [2, 0, 1, 3]
    assert isinstance(caught.value.__cause__, UserError)
    assert "ranks 0, 1, 3 last seen at" in str(caught.value)
    assert_next_case_passes(ranks)


def test_a_rank_that_skips_a_collective_fails_the_case_in_time(ranks: RankPool) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"within 0\.5 s\n(?s:.)*rank 2 returned\n") as caught:
        ranks.run(skip_a_collective_on, 2, timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert caught.value.ranks == [0, 1, 3]
    assert str(caught.value).count("dist.barrier()") == 1
    assert_next_case_passes(ranks)


def test_a_rank_that_dies_fails_the_case_by_name(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 2 died with exit code 3") as caught:
        ranks.run(die_on, 2, timeout_s=30)
    assert caught.value.ranks[0] == 2
    assert_next_case_passes(ranks)


def test_a_rank_that_died_between_cases_is_replaced(ranks: RankPool) -> None:
    before = ranks.run(process_id, timeout_s=30)
    os.kill(before[1], signal.SIGKILL)
    assert_gone(before[1:2])
    after = ranks.run(process_id, timeout_s=30)
    assert [now == then for now, then in zip(after, before, strict=True)] == [True, False, True, True]


def test_an_unfinished_collective_does_not_reach_the_next_case(ranks: RankPool) -> None:
    ranks.run(leave_a_collective_unfinished, timeout_s=30)
    assert_next_case_passes(ranks)


def test_threads_of_a_case_end_with_it(ranks: RankPool) -> None:
    before = ranks.run(num_threads, timeout_s=30, world=2)
    for size in (2, 4, 6):  # torch keeps the mesh of each shape
        ranks.run(gather_whole, size, timeout_s=30, world=2)
    assert ranks.run(num_threads, timeout_s=30, world=2) == before


def test_ctrl_c_leaves_no_rank_in_the_middle_of_a_case(ranks: RankPool) -> None:
    before = ranks.run(process_id, timeout_s=30)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            ranks.run(hang, timeout_s=30)
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert_gone(before)
    assert_next_case_passes(ranks)


def run_script_with_a_pool(last_line: str) -> tuple[int, list[int]]:
    """Exit code, and the process ids of ranks that the script leaves to themselves."""
    lines = [
        "import os, signal",
        "from omnitrain.parallel.spawn.pool import RankPool",
        "pool = RankPool(2)",
        "print(*pool.run('os:getpid', timeout_s=30), flush=True)",
        last_line,
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""
    return ended.returncode, [int(pid) for pid in ended.stdout.split()]


@pytest.mark.second
def test_ranks_end_when_their_process_is_killed() -> None:
    exit_code, process_ids = run_script_with_a_pool("os.kill(os.getpid(), signal.SIGKILL)")
    assert (exit_code, len(process_ids)) == (-signal.SIGKILL, 2)
    assert_gone(process_ids)


@pytest.mark.slow
def test_a_script_that_forgets_to_close_its_pool_ends() -> None:
    exit_code, process_ids = run_script_with_a_pool("pass")
    assert (exit_code, len(process_ids)) == (0, 2)
    assert_gone(process_ids)


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from omnitrain.parallel.spawn.pool import RankPool\nRankPool(1).run('os:getpid', timeout_s=30)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "rank 0 ended with exit code 1 during its start; in a script, put the code that starts ranks" in ended.stderr


def test_what_cannot_be_sent_is_refused(ranks: RankPool) -> None:
    with pytest.raises(
        UserError, match=r"cannot be sent to other processes.*expected a function at the top level of a module"
    ):
        ranks.run(lambda: None, timeout_s=30)
    with pytest.raises(RankError, match=r"cannot pickle '_thread.lock' object"):
        ranks.run(unpicklable, timeout_s=30, world=1)
    with pytest.raises(UserError, match="found 5 ranks; this pool can run 1 to 4"):
        ranks.run(process_id, timeout_s=30, world=5)


def test_fifty_cases_in_a_row_start_no_rank(ranks: RankPool) -> None:
    assert_next_case_passes(ranks)
    started = ranks.num_starts
    for _ in range(50):
        ranks.run(add_up, 1.0, timeout_s=30, world=2)
    assert ranks.num_starts == started
