"""Ranks that use a model together, and what they tell each other so that none waits for a call that never comes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Protocol, TypeVar

from omnitrain.errors import TrainingError, UserError

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


class Peers(Protocol):
    """Ranks that each have rows of their own. Every method is called by all of them, in the same order.

    Attributes:
        rank: this one.
        size: how many there are.
    """

    rank: int
    size: int

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


class Alone:
    """The peers of a single process."""

    rank = 0
    size = 1

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


ALONE = Alone()


def agreed(peers: Peers, make: Callable[[], T]) -> T:
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
