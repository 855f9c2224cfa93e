"""Many ranks in one process: each is a thread, and a stand-in for ``torch.distributed`` counts what they send.

It has the functions that ``omnitrain.peers`` and ``omnitrain.ops.collectives`` use, over values in place of a network.
A rank sends and holds what torch's own functions make it send and hold: gathered objects are pickled, and padded to the
longest one of all ranks.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

T = TypeVar("T")

_WORD = 8  # bytes of a length, which every exchange of objects sends first
_STACK = 2**20  # bytes; a rank needs little, and there are a thousand


class SimulatedRanks:
    """``size`` ranks that run one function together.

    Attributes:
        sent: bytes that each rank has sent.
        held: bytes that each rank has received, with its own part of every exchange.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent, self.held = [0] * size, [0] * size
        self._here = threading.local()
        self._values: list[Any] = [None] * size
        self._combine: Callable[[list[Any]], Any] = list
        self._combined: Any = None
        self._barrier = threading.Barrier(size, action=self._meet)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Call ``work(rank)`` on all ranks, and return their results; an error of one is raised."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def on_rank(rank: int) -> None:
            self._here.rank = rank
            try:
                results[rank] = work(rank)
            except threading.BrokenBarrierError:  # another rank has failed
                pass
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        before = threading.stack_size(_STACK)
        stand_ins = {name.removeprefix("_dist_"): getattr(self, name) for name in dir(self) if name[:6] == "_dist_"}
        with patch.multiple(dist, **stand_ins):
            threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        threading.stack_size(before)
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.size)]

    def _meet(self) -> None:
        """Run by one rank when all have come: the next exchange begins when all have read the result of this one."""
        self._combined = self._combine(self._values)

    def _exchange(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        self._values[self._here.rank], self._combine = value, combine
        self._barrier.wait()
        return self._combined

    def _count(self, sent: int, held: int) -> None:
        self.sent[self._here.rank] += sent
        self.held[self._here.rank] += held

    def _dist_is_initialized(self) -> bool:
        return True

    def _dist_get_rank(self, group: Any = None) -> int:
        return self._here.rank

    def _dist_get_world_size(self, group: Any = None) -> int:
        return self.size

    def _dist_new_group(self, ranks: Sequence[int], **_: Any) -> SimulatedRanks:
        return self

    def alltoall_base(
        self, out: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int], _: Any
    ) -> SimulatedRanks:
        """Swap parts, as a process group does it; without sizes, each part is one element."""
        of_ranks = self._exchange(sent.split(sent_sizes or 1), list)
        self._count(sent.nbytes, out.nbytes)
        torch.cat([parts[self._here.rank] for parts in of_ranks], out=out)
        return self

    def wait(self) -> None:
        """All is there."""

    def _dist_destroy_process_group(self, group: Any = None) -> None:
        pass

    def _dist_all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        self._count(tensor.nbytes, tensor.nbytes)
        reduce = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MAX: torch.amax}[op]
        tensor.copy_(self._exchange(tensor.clone(), lambda values: reduce(torch.stack(values), 0)))

    def _dist_all_gather_object(self, objects: list[Any], value: Any, group: Any = None) -> None:
        longest, objects[:] = self._exchange(pickle.dumps(value), _unpickled)
        self._count(longest + _WORD, self.size * (longest + _WORD))

    def _dist_broadcast_object_list(
        self, objects: list[Any], src: int | None = None, group: Any = None, device: Any = None, group_src: int = 0
    ) -> None:
        source = group_src if src is None else src
        is_there = self._here.rank == source
        pickled = self._exchange(pickle.dumps(objects) if is_there else b"", lambda values: values[source])
        self._count((len(pickled) + _WORD) * is_there, len(pickled) + _WORD)
        if not is_there:
            objects[:] = pickle.loads(pickled)


def _unpickled(values: list[bytes]) -> tuple[int, list[Any]]:
    """The longest of all, and the objects; the ranks share them, which saves the time to make a million."""
    return max(map(len, values)), [pickle.loads(value) for value in values]


class GroupsMade:
    """Counts the process groups that ``torch.distributed`` makes within a ``with`` block."""

    def __enter__(self) -> GroupsMade:
        self.number, make = 0, dist.new_group

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return make(*args, **kwargs)

        self._patch = patch.object(dist, "new_group", counted)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):
            self._patch.stop()
