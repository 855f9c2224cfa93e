"""The process of a rank that writes its checkpoints while it trains on, and this process's end of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe

import torch
import torch.distributed as dist

from omnitrain.checkpoint.shared_memory import SharedMemory, SharedMessage, received
from omnitrain.checkpoint.store import CheckpointStore
from omnitrain.data.loading.data_process import end_with_parent
from omnitrain.errors import TrainingError
from omnitrain.parallel.step.rendezvous import Rendezvous
from omnitrain.peers import SINGLE_PROCESS, GlooGroup, Peers, told_error
from omnitrain.train.run_state.snapshot import Snapshot, write_snapshot

_PATIENCE = timedelta(days=7)  # the writers of other ranks connect after their own rank has copied its part
_END_SECONDS = 5.0
# Where the writer shares a core with a rank that computes, it gets a tenth of that core; it gets all of an idle one.
_NICE = 10


class CheckpointWriter:
    """A process that writes checkpoints, one at a time. The writers of all ranks work together.

    It is a new Python process and not a fork of this one, whose threads and devices a fork would break. It imports
    neither the main script nor a notebook, and ends with this process, however that ends. ``number``, the same on all
    ranks, counts the writers that this rank has started before. ``error``: why the last checkpoint was not written.
    None: it was.
    """

    error: Exception | None

    def __init__(self, rendezvous: Rendezvous, number: int = 0) -> None:
        self._memory = SharedMemory()
        self._connection, theirs = Pipe()
        shared = (theirs.fileno(), self._memory.descriptor)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # The process inherits the mask: a scheduler sends these signals to all processes, also while they start.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *map(str, (*shared, os.getpid(), number))],
                pass_fds=shared,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
                # Ctrl-C in a terminal is for the ranks, which let this process finish. In a session of its own, Linux
                # would give it as much of the cores as all ranks together, whatever its priority is.
                process_group=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
        theirs.close()
        self._is_busy, self.error = False, None
        self._send(rendezvous)

    def begin(self, store: CheckpointStore, snapshot: Snapshot) -> None:
        """Copy ``snapshot``, and let the process write it to ``store``. The one before must have ended."""
        message = self._memory.message((store, snapshot))
        self._is_busy = True
        self._send(message)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint that was begun is neither written nor failed."""
        if self._is_busy and self._connection.poll():
            self._is_busy = False
            try:
                self.error = self._connection.recv()
            except (EOFError, OSError):
                code = self._process.wait()
                self.error = TrainingError(
                    f"the process that writes checkpoints ended with exit code {code}; earlier checkpoints are intact"
                )
        return self._is_busy

    def close(self) -> None:
        """End the process. A checkpoint that it is writing stays unfinished."""
        self._connection.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # a disk that does not answer
            self._process.wait(_END_SECONDS)
        self._memory.close()

    def _send(self, message: Rendezvous | SharedMessage) -> None:
        with suppress(OSError):  # the process has ended, which `is_writing` notices
            self._connection.send(message)


def main(connection: Connection, descriptor: int, parent: int, number: int) -> None:
    """Entry of the writer process: write each snapshot that arrives on ``connection`` from the process ``parent``."""
    end_with_parent()  # another run may continue in its folder
    if os.getppid() != parent:  # it ended before the call above
        return
    torch.set_num_threads(1)
    rendezvous: Rendezvous = connection.recv()
    peers: Peers | None = None
    with suppress(EOFError):
        while True:
            message: SharedMessage = connection.recv()
            try:
                peers = peers or _meet(rendezvous, number)
                store, snapshot = received(message, descriptor)
                write_snapshot(store, snapshot, peers)
                connection.send(None)
            except Exception as error:  # raised by the process that trains
                connection.send(told_error(error, rendezvous.rank))
                return  # the writers of other ranks may wait for this one; its end tells them
            del store, snapshot


def _meet(rendezvous: Rendezvous, number: int) -> Peers:
    if rendezvous.world_size == 1:
        return SINGLE_PROCESS
    rank = rendezvous.rank
    store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=_PATIENCE)
    prefixed = dist.PrefixStore(f"checkpoint writers {number}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=rendezvous.world_size, timeout=_PATIENCE)
    return GlooGroup.of_default_group()


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), *map(int, sys.argv[2:]))
