"""What a process does otherwise where it is one of several ranks: the environment of a launcher says so."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LAUNCHER = "OMNITRAIN_LAUNCHER"  # process id of the launcher of `omnitrain run --nproc`

FIRST_TO_FAIL = "omnitrain/first_to_fail"  # in the launcher's store: the rank

_LAST_WORDS = "omnitrain/last_words"
_CONNECT = timedelta(seconds=5)
_PATIENCE_SECONDS = 5.0  # of the other ranks, for what rank 0 has to say
_POLL_SECONDS = 0.05


def global_rank() -> int:
    """This process's rank among all; 0 for a process alone."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Its rank among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def end_with_launcher() -> None:
    """Let no rank outlive the launcher of ``omnitrain run --nproc``, however that ends (on Linux)."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    from omnitrain.data.ahead import end_with_parent

    end_with_parent()
    if os.getppid() != int(launcher):  # it ended before the line above
        os._exit(1)


def name_to_launcher(rank: int) -> None:
    """Tell the launcher that ``rank`` was the first one to fail, whoever ends first."""
    with suppress(RuntimeError):  # as below
        store = _launcher_store()
        if store is not None:
            store.set(FIRST_TO_FAIL, str(rank))


def own_words(message: str) -> str | None:
    """What this rank has to print where it ends with ``message``.

    A mistake in a recipe is found by all ranks, and is to be read once: rank 0 says it, another rank speaks only if
    rank 0 has nothing to say within some seconds, or something else.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return message
    rank = global_rank()
    try:
        store = _launcher_store()
        if store is not None and rank == 0:
            store.set(_LAST_WORDS, message)
        if store is not None and rank != 0 and _words_of_rank_0(store) == message:
            return None
    except RuntimeError:  # torch's own for a store that is gone: so is the launcher
        pass
    return message if rank == 0 else f"rank {rank}: {message}"


def _words_of_rank_0(store: TCPStore) -> str | None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if store.check([_LAST_WORDS]):
            return store.get(_LAST_WORDS).decode()
        time.sleep(_POLL_SECONDS)
    return None


def _launcher_store() -> TCPStore | None:
    """The launcher's store; None where rank 0 would have to provide it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    from torch.distributed import TCPStore

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_CONNECT)
