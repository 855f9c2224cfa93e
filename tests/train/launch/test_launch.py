"""The launcher, mostly with programs that do not import torch and so start at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from omnitrain.errors import TrainingError, UserError
from omnitrain.train.launch.environment import own_words
from omnitrain.train.launch.launch import launch

ROOT = Path(__file__).parents[3]
INTERRUPTIBLE = """
    from omnitrain.train.interrupt import Interrupt
    with Interrupt() as interrupt:
        announce()
        while not interrupt.requested:
            time.sleep(0.01)
        time.sleep(1.5)  # the step, and the checkpoint
        Path(f"saved-{rank}").touch()
    sys.exit(143 if interrupt.is_terminated else 130)
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed launcher leaves its folder


def program(body: str) -> list[str]:
    """A program that knows its `rank`; `announce()` leaves its process id in the file `pid-RANK`."""
    head = """
    import os, signal, sys, time, traceback
    from pathlib import Path
    rank = int(os.environ["RANK"])
    def announce():
        Path(f"pid-{rank}.new").write_text(str(os.getpid()))
        os.rename(f"pid-{rank}.new", f"pid-{rank}")
    """
    Path("program.py").write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return ["program.py"]


def process_ids(nproc: int) -> list[int]:
    deadline = time.monotonic() + 60
    files = [Path(f"pid-{rank}") for rank in range(nproc)]
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def send_when_up(nproc: int, rank: int | None, number: int) -> threading.Thread:
    """Signal a rank, or this process (the launcher), when all ranks are up."""

    def send() -> None:
        ids = process_ids(nproc)
        os.kill(os.getpid() if rank is None else ids[rank], number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()


def assert_gone(ids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while left := [process for process in ids if is_running(process)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


def test_ranks_find_each_other_and_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = program("""
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(os.environ["LOCAL_RANK"]), torch.get_num_threads()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    Path(f"total-{rank}").write_text(f"{total.tolist()} {os.environ['LOCAL_WORLD_SIZE']}")
    """)
    environment = dict(os.environ)
    assert launch(script, 2, stop_seconds=60) == 0
    assert os.environ == environment
    threads = 2 * max(1, len(os.sched_getaffinity(0)) // 2)
    assert [Path(f"total-{rank}").read_text() for rank in range(2)] == [f"[1.0, {threads}.0] 2"] * 2


@pytest.mark.parametrize(
    ("ends", "code"), [((0, 0), 0), ((2, 2), 2), ((1, 2), 2), ((130, 130), 130), ((143, 143), 143), ((143, 130), 143)]
)
def test_the_exit_code_is_that_of_one_process(ends: tuple[int, int], code: int) -> None:
    assert launch(program(f"sys.exit({ends}[rank])"), 2, stop_seconds=60) == code


def test_a_rank_that_fails_is_named_and_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    script = program("""
    announce()
    print("progress", rank)
    if rank == 1:
        raise ValueError("no such thing")
    time.sleep(600)
    """)
    with pytest.raises(TrainingError, match=r"^rank 1 ended with exit code 1; the other ranks were ended$"):
        launch(script, 3, stop_seconds=60)
    assert_gone(process_ids(3), within_s=0)
    shown = capfd.readouterr()
    assert shown.err.splitlines()[-1] == "[rank 1] ValueError: no such thing"
    assert shown.out in ("", "progress 0\n")  # what the others print is not shown
    assert "elastic" not in shown.err


def test_the_rank_that_failed_first_is_named_and_heard_though_another_ends_before_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = program("""
    from omnitrain.train.launch.environment import name_to_launcher
    if rank == 1:
        name_to_launcher(rank)
        announce()
        time.sleep(3)  # longer than others get for their last words
        try:
            raise ValueError("no such thing")
        except ValueError:
            traceback.print_exc()
        os._exit(1)  # at once: on a busy machine, Python takes seconds to end
    while not Path("pid-1").exists():
        time.sleep(0.02)
    sys.exit(1)
    """)
    with pytest.raises(TrainingError, match=r"^rank 1 ended with exit code 1; the other ranks were ended$"):
        launch(script, 2, stop_seconds=60)
    assert capfd.readouterr().err.splitlines()[-1] == "[rank 1] ValueError: no such thing"


def test_a_killed_rank_is_named_and_no_process_is_left() -> None:
    script = program("announce()\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)")
    sender = send_when_up(3, rank=2, number=signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(
        TrainingError, match=r"^rank 2 was killed by SIGKILL \(exit code -9\); the other ranks were ended$"
    ):
        launch(script, 3, stop_seconds=60)
    assert time.monotonic() - began < 20
    sender.join()
    assert_gone(process_ids(3), within_s=0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_lets_all_ranks_finish_and_save(number: int, code: int) -> None:
    sender = send_when_up(2, rank=None, number=number)
    assert launch(program(INTERRUPTIBLE), 2, stop_seconds=60) == code
    sender.join()
    assert Path("saved-0").exists() and Path("saved-1").exists()


def test_ctrl_c_of_a_terminal_reaches_launcher_and_ranks_and_still_counts_once() -> None:
    senders = [send_when_up(2, rank=rank, number=signal.SIGINT) for rank in (None, 0, 1)]
    assert launch(program(INTERRUPTIBLE), 2, stop_seconds=60) == 130
    for sender in senders:
        sender.join()
    assert Path("saved-0").exists() and Path("saved-1").exists()


def test_ranks_that_are_not_far_enough_to_catch_a_signal_were_interrupted_too() -> None:
    sender = send_when_up(2, rank=None, number=signal.SIGTERM)
    assert launch(program("announce()\ntime.sleep(600)"), 2, stop_seconds=60) == 143
    sender.join()
    assert_gone(process_ids(2), within_s=0)


def test_ranks_that_do_not_stop_in_time_are_killed_and_named() -> None:
    sender = send_when_up(2, rank=None, number=signal.SIGINT)
    script = program("signal.signal(signal.SIGINT, lambda *_: rank == 1 or sys.exit(130))\nannounce()\ntime.sleep(600)")
    with pytest.raises(TrainingError, match=r"^rank 1 did not stop within 1 s \(train.stop_seconds\); killed$"):
        launch(script, 2, stop_seconds=1)
    sender.join()
    assert_gone(process_ids(2), within_s=0)


@pytest.mark.second
def test_no_rank_outlives_a_killed_launcher() -> None:
    script = program("""
    from omnitrain.train.launch.environment import end_with_launcher
    end_with_launcher()
    announce()
    time.sleep(600)
    """)
    call = f"from omnitrain.train.launch.launch import launch; launch({script}, 2, stop_seconds=60)"
    launcher = subprocess.Popen([sys.executable, "-c", call])
    ids = process_ids(2)
    launcher.kill()
    launcher.wait()
    assert_gone(ids, within_s=10)


def test_a_rank_cannot_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="RANK is set"):
        launch([], 2, stop_seconds=60)


def test_other_ranks_speak_only_where_rank_0_does_not_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr("omnitrain.train.launch.environment._PATIENCE_SECONDS", 0.2)
    monkeypatch.setenv("RANK", "1")
    assert own_words("no file") == "rank 1: no file"  # rank 0 is silent
    monkeypatch.setenv("RANK", "0")
    assert own_words("no file") == "no file"
    monkeypatch.setenv("RANK", "1")
    assert own_words("no file") is None
    assert own_words("no memory") == "rank 1: no memory"


@pytest.mark.slow
def test_a_mistake_that_all_ranks_find_is_told_once() -> None:
    Path("recipe.yaml").write_text("model: {foundation: some/model}\ndata: {train: [{path: train.parquet}]}\n")
    command = [sys.executable, "-m", "omnitrain", "run", "recipe.yaml", "train.device=gpu", "--nproc", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("omnitrain: 3 problems in recipe.yaml:\n  train.device: 'gpu' is not a device; ")
    assert [done.stderr.count(key) for key in ("omnitrain:", "train.device", "model.foundation", "  data:")] == [1] * 4
