"""Check that all ranks share a folder, also across machines."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from omnitrain.errors import UserError
from omnitrain.peers import Peers, all_or_raise

_TIMEOUT_S = 60.0  # network file systems may cache a folder's listing for this long
_POLL_S = 0.5


def require_seen(path: Path, folder: Path, peers: Peers) -> None:
    """Wait until all ranks see ``path`` in ``folder``, which rank 0 made; raise a UserError on all if one does not."""
    all_or_raise(peers, lambda: _require_seen(path, folder))


def _require_seen(path: Path, folder: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"output_dir: {str(folder.absolute())!r} on {socket.gethostname()} is not the folder of rank 0; "
                "every rank writes and reads its shards of a checkpoint: use a folder that all machines share"
            )
        time.sleep(_POLL_S)
