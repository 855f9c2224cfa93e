"""Read the launcher's environment variables, and talk to the launcher as one of several ranks."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LAUNCHER = "OMNITRAIN_LAUNCHER"  # process id of the launcher of `omnitrain run --nproc`

FIRST_TO_FAIL = "omnitrain/first_to_fail"  # key of this rank in the launcher's store

_LAST_MESSAGE = "omnitrain/last_words"
_CONNECT = timedelta(seconds=5)
_PATIENCE_SECONDS = 5.0  # how long other ranks wait for the message of rank 0
_POLL_SECONDS = 0.05


def global_rank() -> int:
    """Return the global rank of this process; 0 for a single process."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Return whether a user's command started this process first: the launcher, a single process, or rank 0."""
    return global_rank() == 0 and LAUNCHER not in os.environ


def local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def end_with_launcher() -> None:
    """End this rank when the launcher of ``omnitrain run --nproc`` ends for any reason (on Linux)."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    from omnitrain.data.loading.data_process import end_with_parent

    end_with_parent()
    if os.getppid() != int(launcher):  # the launcher ended before the call above
        os._exit(1)


def name_to_launcher(rank: int) -> None:
    """Tell the launcher that ``rank`` was the first to fail, even if another rank ends first."""
    with suppress(RuntimeError):  # torch raises it if the launcher's store is gone
        store = _launcher_store()
        if store is not None:
            store.set(FIRST_TO_FAIL, str(rank))


def own_words(message: str) -> str | None:
    """Return what this rank prints of ``message``: rank 0 all, others what rank 0 does not say in time; or None."""
    if world_size() == 1:
        return message
    rank = global_rank()
    try:
        store = _launcher_store()
        if store is not None and rank == 0:
            store.set(_LAST_MESSAGE, message)
        if store is not None and rank != 0 and _message_of_rank_0(store) == message:
            return None
    except RuntimeError:  # torch raises it if the launcher's store is gone
        pass
    return message if rank == 0 else f"rank {rank}: {message}"


def _message_of_rank_0(store: TCPStore) -> str | None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if store.check([_LAST_MESSAGE]):
            return store.get(_LAST_MESSAGE).decode()
        time.sleep(_POLL_SECONDS)
    return None


def _launcher_store() -> TCPStore | None:
    """Return the launcher's store, or None if the launcher has none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    from torch.distributed import TCPStore

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_CONNECT)
