"""The data processes of all ranks, talking to each other on the CPU beside whatever the ranks do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from omnitrain.errors import TrainingError
from omnitrain.plan import needed_capacity, padded

# Data processes run ahead, and wait for each other while their ranks save or evaluate. A dead one is noticed at once.
_PATIENCE = timedelta(days=7)
_TO_COME = timedelta(minutes=2)  # from the first to the last data process of a run; they are started together
_FAILED_ELSEWHERE = "the data failed on another rank"
_FIRST_CAPACITY = 1024  # words


@dataclass(frozen=True)
class Rendezvous:
    """Where the data processes of all ranks find each other.

    Attributes:
        host: of the store.
        port: of the store.
        rank: that the process belongs to.
        world_size: number of ranks.
        store: keeps the place open, on rank 0; not pickled.
    """

    host: str
    port: int
    rank: int
    world_size: int
    store: dist.Store | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rendezvous, (self.host, self.port, self.rank, self.world_size)


def open_rendezvous() -> Rendezvous:
    """A new place to meet, for as long as it is kept on rank 0. Every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Rendezvous("", 0, 0, 1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    host = os.environ.get("MASTER_ADDR", "localhost")  # where rank 0 is
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    said: list[int] = [store.port if store is not None else 0]
    dist.broadcast_object_list(said, src=0)
    return Rendezvous(host, said[0], rank, world_size, store)


class DataProcessGroup:
    """What the data processes of all ranks tell each other. Can be pickled until it is first used.

    Args:
        rendezvous: where they find each other.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self._capacity = _FIRST_CAPACITY

    def tables(self, table: np.ndarray) -> list[np.ndarray]:
        """The tables of all ranks, in order of ranks.

        Args:
            table: ``[words]`` int64 of this rank, the first word its length.

        Raises:
            TrainingError: a rank is gone.
        """
        if self.rendezvous.world_size == 1:
            return [table]
        gathered = self._gathered(table)
        if (needed := needed_capacity(gathered)) > self._capacity:  # all ranks see that
            self._capacity = 2 * needed
            gathered = self._gathered(table)
        return gathered

    def swap(self, parcels: Sequence[bytes]) -> list[bytes]:
        """Send ``parcels[r]`` to rank r; what each rank sent to this one.

        Raises:
            TrainingError: a rank is gone.
        """
        if self.rendezvous.world_size == 1:
            return list(parcels)
        sent = [len(parcel) for parcel in parcels]
        lengths = torch.empty(len(sent), dtype=torch.int64)
        self._swapped(lengths, torch.tensor(sent), [], [])
        received = lengths.tolist()
        out = torch.empty(sum(received), dtype=torch.uint8)
        content = torch.frombuffer(bytearray(b"".join(parcels)) or bytearray(1), dtype=torch.uint8)[: sum(sent)]
        self._swapped(out, content, received, sent)
        return [part.numpy().tobytes() for part in out.split(received)]

    def _gathered(self, table: np.ndarray) -> list[np.ndarray]:
        own = torch.from_numpy(padded(table, self._capacity))
        tables = [torch.empty_like(own) for _ in range(self.rendezvous.world_size)]
        self._finish(self._group.allgather([tables], [own]))
        return [words.numpy() for words in tables]

    def _swapped(self, out: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        self._finish(self._group.alltoall_base(out, sent, received_sizes, sent_sizes, dist.AllToAllOptions()))

    def join(self) -> None:
        """Meet the others now, not at the first use; all must.

        Raises:
            TrainingError: a rank does not come.
        """
        if self.rendezvous.world_size > 1:
            self._group = self._met(_TO_COME)

    def leave(self) -> None:
        """Say no more: a rank that waits for this one gets an error instead of an answer."""
        self.__dict__.pop("_group", None)

    def _finish(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:  # gloo's own for a connection that was closed
            del work  # it would keep this rank's connections open, on which others may wait
            raise TrainingError(_FAILED_ELSEWHERE) from error

    @cached_property
    def _group(self) -> Any:
        return self._met(_PATIENCE)

    def _met(self, patience: timedelta) -> Any:
        """Apart from torch's default group: that belongs to the rank, this to its data process."""
        rendezvous = self.rendezvous
        try:
            store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=patience)
            number = store.add(f"meetings/{rendezvous.rank}", 1)  # this rank's here: the same on all ranks
            place = dist.PrefixStore(f"meeting {number}", store)  # where nobody of an earlier one is still written down
            group = dist.ProcessGroupGloo(place, rendezvous.rank, rendezvous.world_size, patience)
        except dist.DistStoreError as error:  # somebody has not come
            seconds = patience.total_seconds()
            raise TrainingError(
                f"the data processes of {rendezvous.world_size} ranks did not meet within {seconds:.0f} s: at least "
                "one ended before it had read a row; its rank says why"
            ) from error
        except RuntimeError as error:  # somebody has come and left, while this one was still connecting
            raise TrainingError(_FAILED_ELSEWHERE) from error
        group._set_default_timeout(_PATIENCE)
        return group
