"""Ranks on a slow network, on one machine.

The ranks of a benchmark run in a network namespace of their own, whose loopback ``tc`` limits, each pinned to a core:
communication takes real time and hardly any processor. That needs root and iproute2.

A script starts itself as its ranks with ``--as-rank`` (:func:`run_ranks`); rank 0 prints what was found as its last
line, in JSON. Between barriers, :func:`seconds` takes the time.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from omnitrain.parallel.state import leave_process_groups

BUCKET_BYTES = 100_000  # pass at once: small messages take their time, too. A packet must fit.


@contextmanager
def own_loopback() -> Iterator[list[str]]:
    """Return the prefix of a command that runs it in a network namespace, where the loopback can be limited."""
    name = f"omnitrain_{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up", "mtu", "9000"], check=True)
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def may_limit() -> bool:
    """Whether this machine allows to create and limit a network namespace."""
    try:
        with own_loopback() as inside:
            return subprocess.run([*inside, "tc", "qdisc", "show"], check=False, capture_output=True).returncode == 0
    except (OSError, subprocess.CalledProcessError):
        return False


def limit(bits_per_second: float) -> None:
    """Limit the sum of all ranks' traffic; called inside the namespace."""
    bucket = ["rate", f"{bits_per_second:.0f}bit", "burst", f"{BUCKET_BYTES}b", "latency", "400ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *bucket], check=True)


def bytes_on_the_wire() -> int:
    """Return the bytes that the loopback has sent so far, including headers."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def seconds(run: Callable[[], Any], steps: int) -> float:
    """Return the seconds per repetition, from barrier to barrier."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        run()
    dist.barrier()
    return (time.perf_counter() - began) / steps


@contextmanager
def joined_ranks() -> Iterator[None]:
    """The process group of these ranks.

    All leave it together, because an exchange fails if the other rank is gone.
    """
    dist.init_process_group("gloo")
    try:
        yield
        dist.barrier()
    finally:
        leave_process_groups()


def run_ranks(script: str, arguments: list[str], *, ranks: int, is_limited: bool) -> dict[str, Any]:
    """Start ``script`` as ``ranks`` ranks, each on a core, and return what the first one printed last.

    Args:
        script: path of a Python script that takes ``--as-rank``.
        arguments: further ones.
        ranks: how many.
        is_limited: whether they may :func:`limit` their loopback; they have it for themselves then.
    """
    cores = sorted(os.sched_getaffinity(0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with own_loopback() if is_limited else nullcontext([]) as prefix:
        processes = []
        for rank in range(ranks):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command = [*prefix, "taskset", "-c", str(cores[rank % len(cores)])]
            command += [sys.executable, script, "--as-rank", *arguments]
            processes.append(subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
    if failed := [rank for rank, process in enumerate(processes) if process.returncode]:
        sys.exit(f"ranks {failed} failed")
    return json.loads(outputs[0].splitlines()[-1])
