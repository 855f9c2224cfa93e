"""A folder that all ranks share, also those on other machines."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from omnitrain.errors import UserError
from omnitrain.peers import Peers, all_or_raise

_SEEN_WITHIN_S = 60.0  # machines that share a folder may keep for so long what they saw of it last
_LOOK_EVERY_S = 0.5


def require_seen(path: Path, folder: Path, peers: Peers) -> None:
    """Wait until all ranks see what rank 0 has made.

    Args:
        path: of a file or folder in ``folder``.
        folder: of the run.
        peers: its ranks, which all call this.

    Raises:
        UserError: on all ranks, where one does not see it.
    """
    all_or_raise(peers, lambda: _require_seen(path, folder))


def _require_seen(path: Path, folder: Path) -> None:
    give_up = time.monotonic() + _SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > give_up:
            raise UserError(
                f"output_dir: {str(folder.absolute())!r} on {socket.gethostname()} is not the folder of rank 0; "
                "every rank writes and reads its part of a checkpoint: name a folder that all machines share"
            )
        time.sleep(_LOOK_EVERY_S)
