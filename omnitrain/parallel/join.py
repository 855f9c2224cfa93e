"""Join the ranks that a launcher's environment variables name, and tell for which of them this process waits."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from omnitrain.errors import TrainingError, UserError
from omnitrain.parallel.environment import require_own_gpu

SILENT_SECONDS = 10.0  # ranks that a launcher starts together come within it
_NAMED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # the launcher has the store, instead of rank 0
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # that store has the keys of earlier attempts, too
_VARIABLES = (*_NAMED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", _AGENT)
_POLL_SECONDS = 0.1
_PROBE_SECONDS = 5.0
_MANY = 8


def join_process_group(backend: str) -> None:
    """Create the default process group of the ranks that the environment names. All ranks must call it.

    If they do not come within :data:`SILENT_SECONDS`, a line on stderr says which ranks are missing, where this one
    waits, and which variables to unset. Torch's GPU is not bound to the group (``device_id``): until pytorch#197568 is
    mended, a group of the host with some of the ranks would then wait for ever. Raises UserError: a variable is
    missing, or another rank has the GPU of this one; TrainingError: ranks did not come within torch's time limit.
    """
    if missing := [name for name in _NAMED if not os.environ.get(name)]:
        raise UserError(f"{_set()} set, but not {', '.join(missing)}; {_unset()}")
    host = os.environ["MASTER_ADDR"]
    rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    waits = f"rank {rank} of {world_size} waits at {host}:{port}"
    is_host = rank == 0 and os.environ.get(_AGENT) != str(True)
    if not is_host:  # torch's client writes a traceback for each time limit that ends
        _wait_for(lambda: [] if _listens(host, port) else [0], waits)
    shared = dist.TCPStore(
        host, port, world_size, is_host, timeout=default_pg_timeout, wait_for_workers=False, multi_tenant=True
    )
    store = dist.PrefixStore(f"omnitrain/{os.environ.get(_ATTEMPT, '0')}", shared)
    if "nccl" in backend:
        require_own_gpu(store, rank)  # before it joins, so that the others name a rank that ends here
    keys = [f"joined/{other}" for other in range(world_size)]
    store.set(keys[rank], "")
    if rank == 0:
        _wait_for(
            lambda: [] if store.check(keys) else [r for r in range(world_size) if not store.check([keys[r]])], waits
        )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _wait_for(missing: Callable[[], list[int]], waits: str) -> None:
    """Wait until no ranks are missing."""
    start, told = time.monotonic(), False
    while ranks := missing():
        waited = time.monotonic() - start
        if waited > SILENT_SECONDS and not told:
            sys.stderr.write(f"omnitrain: {_message(waits, ranks)}\n")
            told = True
        if waited > default_pg_timeout.total_seconds():
            raise TrainingError(_message(waits, ranks))
        time.sleep(_POLL_SECONDS)


def _message(waits: str, ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MANY])) + (f" and {len(ranks) - _MANY} more" if len(ranks) > _MANY else "")
    return f"{waits} for rank{'s' * (len(ranks) > 1)} {shown}. {_set()} set; {_unset()}"


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), _PROBE_SECONDS):
        return True
    return False


def _set() -> str:
    found = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    return f"{' and '.join(found)} {'are' if len(found) > 1 else 'is'}"


def _unset() -> str:
    return f"if no launcher started ranks, `unset {' '.join(name for name in _VARIABLES if name in os.environ)}`"
