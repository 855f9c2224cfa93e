"""Ranks that work together, and what they tell each other so that none waits for a call that never comes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from omnitrain.errors import TrainingError, UserError

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)

# One of them may score or write for as long as it likes. A dead one is noticed at once, a stalled run by the watch.
_PATIENCE = timedelta(days=7)


class Peers(Protocol):
    """Ranks that each have rows of their own. Every method is called by all of them, in the same order.

    Attributes:
        rank: this one.
        size: how many there are.
        group: the process group over which they talk; None: there is but one.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        ...

    def sum(self, value: float) -> float:
        """The sum of the values of all ranks."""
        ...

    def most(self, counts: Mapping[Key, int]) -> dict[Key, int]:
        """The largest count of every key over all ranks; a key may be missing on some."""
        ...

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in their order."""
        ...


class SingleProcess:
    """The peers of a single process."""

    rank = 0
    size = 1
    group: dist.ProcessGroup | None = None

    def any(self, flag: bool) -> bool:
        """``flag`` itself."""
        return flag

    def sum(self, value: float) -> float:
        """``value`` itself."""
        return value

    def most(self, counts: Mapping[Key, int]) -> dict[Key, int]:
        """``counts`` themselves."""
        return dict(counts)

    def gather(self, value: T) -> list[T]:
        """``value`` alone."""
        return [value]


SINGLE_PROCESS = SingleProcess()


class GlooGroup:
    """Ranks which talk over a gloo group of their own: no answer waits for the device, and no wait ends early.

    Every rank must make one, in the same order as other process groups.

    Args:
        groups: ``[groups, size of each]`` global ranks: each rank talks to those of its own group; None: all to all.

    Attributes:
        rank: this one, among those of its group.
        size: how many there are.
        group: theirs.
    """

    def __init__(self, groups: np.ndarray | None = None) -> None:
        everyone = np.arange(dist.get_world_size())[None] if groups is None else groups
        for ranks in everyone.tolist():
            group = dist.new_group(ranks, backend="gloo", timeout=_PATIENCE, group_desc="peers")
            if dist.get_rank() in ranks:
                self.group: dist.ProcessGroup | None = group
                self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)

    def close(self) -> None:
        """End their group; all of them call this."""
        dist.destroy_process_group(self.group)

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        flags = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flags.item())

    def sum(self, value: float) -> float:
        """The sum of the values of all ranks, in fp64."""
        total = torch.tensor(value, dtype=torch.float64, device="cpu")
        dist.all_reduce(total, group=self.group)
        return total.item()

    def most(self, counts: Mapping[Key, int]) -> dict[Key, int]:
        """The largest count of every key over all ranks; a key may be missing on some."""
        largest: dict[Key, int] = {}
        for theirs in self.gather(dict(counts)):
            for key, count in theirs.items():
                largest[key] = max(count, largest.get(key, count))
        return largest

    def gather(self, value: T) -> list[T]:
        """The value of every rank (pickled), in their order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def all_or_raise(peers: Peers, make: Callable[[], T]) -> T:
    """What ``make`` returns on this rank; where it raises on one rank, all ranks raise.

    Args:
        peers: all of them call this.
        make: works on this rank alone. An error in it would leave the others waiting.

    Raises:
        UserError: ``make`` raised one on another rank.
        TrainingError: it raised that, or something else, there.
    """
    made: list[T] = []
    failed: Exception | None = None
    try:
        made.append(make())
    except Exception as error:  # raised again below, when the others know
        failed = error
    is_users, is_told = isinstance(failed, UserError), isinstance(failed, UserError | TrainingError)
    what = failed and (str(failed) if is_told else f"{type(failed).__name__}: {failed}")
    everyone = peers.gather((is_users, is_told, what))
    if failed is not None:
        raise failed
    for rank, (is_users, is_told, what) in enumerate(everyone):
        if what is not None:  # of rank 0 word for word: what two ranks say alike is shown once
            text = what if is_told and rank == 0 else f"rank {rank} failed: {what}"
            raise (UserError if is_users else TrainingError)(text)
    return made[0]


def parameters_at_rest(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter as an optimizer has it: what a forward gathered, and no backward let go, is sharded again."""
    model.state_dict(keep_vars=True)  # FSDP2 does it before
    return dict(model.named_parameters())


def is_spread(model: nn.Module) -> bool:
    """Whether ``model``, or one around it, was laid out over ranks; one rank counts, too."""
    return any(isinstance(parameter, DTensor) for parameter in parameters_at_rest(model).values())


@contextlib.contextmanager
def ranks_of(model: nn.Module) -> Iterator[Peers]:
    """All ranks, if ``model`` is laid out over ranks, which all call this; else this process alone."""
    if not is_spread(model):
        yield SINGLE_PROCESS
        return
    peers = GlooGroup()
    try:
        yield peers
    finally:
        peers.close()
