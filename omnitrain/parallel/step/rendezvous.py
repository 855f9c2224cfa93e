"""Communication between the data processes of all ranks, on the CPU and independent of the ranks' collectives."""

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
from omnitrain.peers import lost_connections_as, swap_bytes, wait_for
from omnitrain.plan import needed_capacity, padded
from omnitrain.torch_private import set_default_timeout

# Data processes prefetch, and wait for each other while their ranks save or evaluate. A dead one closes its connection.
_PATIENCE = timedelta(days=7)
_TO_COME = timedelta(minutes=2)  # between the first and the last data process to connect; they start together
_FAILED_ELSEWHERE = "the data failed on another rank"
_ENDED_ELSEWHERE = "another rank has ended; its own error says why"
_FIRST_CAPACITY = 128  # words; more once a table needs them


@dataclass(frozen=True)
class Rendezvous:
    """The address where the data processes of all ranks connect."""

    host: str  # host of the store
    port: int  # port of the store
    rank: int  # rank of the data process
    world_size: int  # number of ranks
    # the store itself, kept alive on rank 0; not pickled
    store: dist.Store | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rendezvous, (self.host, self.port, self.rank, self.world_size)


def open_rendezvous() -> Rendezvous:
    """Open a new rendezvous; it lives as long as rank 0 keeps the result. All ranks must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Rendezvous("", 0, 0, 1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    host = os.environ.get("MASTER_ADDR", "localhost")  # the host of rank 0
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: list[int] = [store.port if store is not None else 0]
    dist.broadcast_object_list(port, src=0)
    return Rendezvous(host, port[0], rank, world_size, store)


class DataProcessGroup:
    """A process group of the data processes of all ranks, which connect at a rendezvous. Picklable until then.

    With ``group``, a gloo group of all ranks, they connect nowhere: planning is done where that group belongs to.
    """

    def __init__(self, rendezvous: Rendezvous, group: dist.ProcessGroup | None = None) -> None:
        self.rendezvous = rendezvous
        self._capacity = _FIRST_CAPACITY
        self._lost = _FAILED_ELSEWHERE if group is None else _ENDED_ELSEWHERE
        if group is not None:
            self._group = group

    def tables(self, table: np.ndarray) -> np.ndarray:
        """Gather the tables of all ranks, in order of ranks: ``[ranks, words]`` int64, padded to the same length.

        Args:
            table: ``[words]`` int64 of this rank; the first word is its length.

        Raises:
            TrainingError: another data process has ended.
        """
        if self.rendezvous.world_size == 1:
            return table[None]
        gathered = self._gathered(table)
        if (needed := needed_capacity(gathered)) > self._capacity:  # the same on all ranks
            self._capacity = 2 * needed
            gathered = self._gathered(table)
        return gathered

    def swap(self, parcels: Sequence[bytes]) -> list[bytes]:
        """Send ``parcels[r]`` to rank r, and return the parcels that the ranks sent to this one.

        Raises:
            TrainingError: another data process has ended.
        """
        if self.rendezvous.world_size == 1:
            return list(parcels)
        with lost_connections_as(self._lost):
            return swap_bytes(self._group, parcels)

    def _gathered(self, table: np.ndarray) -> np.ndarray:
        local = torch.from_numpy(padded(table, self._capacity))
        tables = local.new_empty(self.rendezvous.world_size, self._capacity)
        with lost_connections_as(self._lost):
            wait_for(self._group.allgather([list(tables)], [local]))
        return tables.numpy()

    def join(self) -> None:
        """Connect to the others now, instead of at the first use; all data processes must call it.

        Raises:
            TrainingError: a data process does not connect in time.
        """
        if self.rendezvous.world_size > 1:
            self._group = self._connect(_TO_COME)

    def leave(self) -> None:
        """Disconnect; a rank that waits for this one gets an error."""
        self.__dict__.pop("_group", None)

    @cached_property
    def _group(self) -> Any:
        return self._connect(_PATIENCE)

    def _connect(self, patience: timedelta) -> Any:
        """Create a group that is independent of torch's default group, which belongs to the rank's main process."""
        rendezvous = self.rendezvous
        try:
            store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=patience)
            count = store.add(f"meetings/{rendezvous.rank}", 1)  # connections of this rank so far, equal on all ranks
            prefixed = dist.PrefixStore(f"meeting {count}", store)  # without the addresses of an earlier connection
            group = dist.ProcessGroupGloo(prefixed, rendezvous.rank, rendezvous.world_size, patience)
        except dist.DistStoreError as error:  # a data process did not connect
            seconds = patience.total_seconds()
            raise TrainingError(
                f"the data processes of {rendezvous.world_size} ranks did not connect within {seconds:.0f} s: at least "
                "one ended before it read data; the error of its rank says why"
            ) from error
        except RuntimeError as error:  # a data process left while this one was still connecting
            raise TrainingError(_FAILED_ELSEWHERE) from error
        set_default_timeout(group, _PATIENCE)
        return group
