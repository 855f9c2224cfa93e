"""Process groups for small Python values, and errors that end all ranks instead of leaving some of them waiting."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from omnitrain.errors import TrainingError, UserError
from omnitrain.groups import PATIENCE, shared_group

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


class Peers:
    """Ranks that each work on different data; all of them must call every method, in the same order.

    This class is a single process; :class:`GlooGroup` is several ones.
    """

    rank: int = 0  # index of this rank
    size: int = 1
    group: dist.ProcessGroup | None = None  # None: a single process

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is set on any rank."""
        return self.any_of_each([flag])[0]

    def any_of_each(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each of ``flags`` whether it is set on any rank, in one exchange."""
        return list(map(bool, self._reduced(list(flags), torch.uint8, dist.ReduceOp.MAX)))

    def sum(self, value: float) -> float:
        """Return the sum of the values of all ranks, in fp64."""
        return self._reduced(value, torch.float64, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        """Return the largest value of any rank."""
        return self._reduced(value, torch.float64, dist.ReduceOp.MAX)

    def _reduced(self, values: T, dtype: torch.dtype, op: dist.ReduceOp.RedOpType) -> T:
        if self.group is None:
            return values
        result = torch.tensor(values, dtype=dtype, device="cpu")
        dist.all_reduce(result, op=op, group=self.group)
        return cast(T, result.tolist())

    def most(self, counts: Mapping[Key, int]) -> dict[Key, int]:
        """Return the largest count of every key over all ranks; ranks may lack keys."""
        largest: dict[Key, int] = {}
        for counts_of_rank in self.gather(dict(counts)):
            for key, count in counts_of_rank.items():
                largest[key] = max(count, largest.get(key, count))
        return largest

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank (pickled), in rank order. Each rank holds all of them: keep them small."""
        values: list[Any] = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_on_first(self, value: T) -> list[T]:
        """Return the value of every rank (pickled, of any size) on rank 0, in rank order; an empty list on others."""
        if self.group is None:
            return [value]
        parcels = [b""] * self.size
        if self.rank > 0:
            parcels[0] = pickle.dumps(value)
        received = swap_bytes(self.group, parcels)
        return [] if self.rank > 0 else [value, *map(pickle.loads, received[1:])]

    def swap(self, values: Sequence[T]) -> list[T]:
        """Send ``values[r]`` (pickled) to rank r, and return what each rank sent to this one, in rank order."""
        if self.group is None:
            return list(values)
        return [pickle.loads(parcel) for parcel in swap_bytes(self.group, [pickle.dumps(value) for value in values])]

    def of_first(self, value: T) -> T:
        """Return the value of rank 0 (pickled); the values of other ranks do not matter."""
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]


SINGLE_PROCESS = Peers()


class GlooGroup(Peers):
    """:class:`Peers` over a gloo group: calls do not wait for the device, and do not time out.

    Every rank must create it, in the same order relative to other process groups, and use it in the main thread alone:
    equal ranks share one group. ``groups``: global ranks of each. None: one of all ranks. A ValueError: this rank is in
    none of them; such a rank calls :func:`gloo_group_of`.
    """

    def __init__(self, groups: Sequence[Sequence[int]] | None = None) -> None:
        own = gloo_group_of([range(dist.get_world_size())] if groups is None else groups)
        if own is None:
            raise ValueError(f"rank {dist.get_rank()} is in none of the groups {groups}, so it has no peers")
        ranks, self.group = own
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)

    @classmethod
    def of_default_group(cls) -> GlooGroup:
        """Return all ranks over the default group itself, for a process that uses it for nothing else."""
        peers = cls.__new__(cls)
        peers.group, peers.rank, peers.size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        return peers


def gloo_group_of(groups: Sequence[Sequence[int]]) -> tuple[Sequence[int], dist.ProcessGroup] | None:
    """Make gloo groups of global ranks, and return that of this rank with its ranks; None: it is in none."""
    made = [(ranks, shared_group("peers", ranks, "peers", backend="gloo", timeout=PATIENCE)) for ranks in groups]
    return next(((ranks, group) for ranks, group in made if group is not None), None)


def swap_bytes(group: Any, parcels: Sequence[bytes]) -> list[bytes]:
    """Send ``parcels[r]`` to rank r of a gloo group, and return those that arrive; a RuntimeError: a rank has ended."""
    sent = [len(parcel) for parcel in parcels]
    lengths = torch.empty(len(sent), dtype=torch.int64)
    wait_for(group.alltoall_base(lengths, torch.tensor(sent), [], [], dist.AllToAllOptions()))
    received = lengths.tolist()
    arrived = torch.empty(sum(received), dtype=torch.uint8)
    content = torch.frombuffer(bytearray(b"".join(parcels)) or bytearray(1), dtype=torch.uint8)[: sum(sent)]
    wait_for(group.alltoall_base(arrived, content, received, sent, dist.AllToAllOptions()))
    return [parcel.numpy().tobytes() for parcel in arrived.split(received)]


def wait_for(work: Any) -> None:
    """Wait for a collective. A RuntimeError: another rank has ended."""
    try:
        work.wait()
    except RuntimeError:
        del work  # it keeps this rank's connections open, on which others may wait
        raise


@contextlib.contextmanager
def lost_connections_as(message: str) -> Iterator[None]:
    """Raise ``TrainingError(message)`` in place of gloo's RuntimeError, which tells of a rank that has ended."""
    try:
        yield
    except TrainingError:  # it says more
        raise
    except RuntimeError as error:
        raise TrainingError(message) from error


def all_or_raise(peers: Peers, make: Callable[[], T]) -> T:
    """Return the result of ``make`` on this rank; if it raises on any rank, raise on all ranks, which all call this.

    ``make`` has no collectives. Other ranks raise a UserError if it raised one, else a TrainingError.
    """
    results: list[T] = []
    failure: Exception | None = None
    try:
        results.append(make())
    except Exception as error:  # raised again below, after the other ranks know
        failure = error
    raise_on_all(peers, failure)
    return results[0]


def raise_on_all(peers: Peers, failure: Exception | None) -> None:
    """Raise the ``failure`` of any rank on all ranks, as :func:`all_or_raise` does. All ``peers`` call this."""
    if not peers.any(failure is not None):
        return
    is_users, is_complete = isinstance(failure, UserError), isinstance(failure, UserError | TrainingError)
    message = failure and (str(failure) if is_complete else f"{type(failure).__name__}: {failure}")
    outcomes = peers.gather((is_users, is_complete, message))
    if failure is not None:
        raise failure
    rank, (is_users, is_complete, message) = next(found for found in enumerate(outcomes) if found[1][-1] is not None)
    # Rank 0's message stays verbatim, so that equal messages are printed once.
    raise (UserError if is_users else TrainingError)(
        message if is_complete and rank == 0 else f"rank {rank} failed: {message}"
    )


def told_error(error: BaseException, rank: int) -> UserError | TrainingError:
    """Return the error to raise on the other ranks when this rank failed with ``error``."""
    if isinstance(error, UserError):
        return UserError(*error.problems)
    name = f"{type(error).__name__}: {error}".removesuffix(": ")
    return TrainingError(str(error) if isinstance(error, TrainingError) else f"rank {rank} failed: {name}")


def parameters_at_rest(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter as the optimizer has it: parameters that a forward gathered are sharded again."""
    model.state_dict(keep_vars=True)  # FSDP2 reshards in a hook of it
    return dict(model.named_parameters())


def is_spread(model: nn.Module) -> bool:
    """Return whether ``model``, or a model that contains it, was parallelized (also on a single rank)."""
    return any(isinstance(parameter, DTensor) for parameter in parameters_at_rest(model).values())


@contextlib.contextmanager
def ranks_of(model: nn.Module) -> Iterator[Peers]:
    """Yield all ranks if ``model`` is parallelized (then all of them call this), else this process alone."""
    yield GlooGroup() if is_spread(model) else SINGLE_PROCESS
