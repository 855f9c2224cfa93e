"""What ranks tell each other of where they are, in a store that needs no collectives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from omnitrain.parallel.watch.report import Answer, Collectives, Place, report

_ANSWER_SECONDS = 5.0
_REPORT_SECONDS = 10.0
_PART_SECONDS = 1.0
_SEEN_SECONDS = 5.0
_POLL_SECONDS = 0.05


class StallBoard:
    """One rank's side of it. Every method may raise RuntimeError: the process that holds the store is gone."""

    def __init__(self, store: dist.Store, name: str, rank: int, world: int) -> None:
        """``name`` is the same on all ranks, and used once."""
        self.rank = rank
        shared: Any = store  # torch's type stubs lack `clone`
        self._store = dist.PrefixStore(name, shared.clone())  # else a blocking call of others would block this
        self._world = world
        self._last: Place | None = None

    def note(self, place: Place, moves: int) -> int:
        """Keep ``place`` for the case that this process dies, and add to the moves of all ranks, which it returns."""
        if place is not self._last:
            self._store.set(f"place/{self.rank}", json.dumps(_plain(place)))
            self._last = place
        return self._store.add("moves", moves)

    def somebody_told(self) -> bool:
        """Another rank has found that the run stands still."""
        return self._store.check(["told"])

    def leave(self) -> None:
        """This rank takes part no more."""
        self._store.set(f"left/{self.rank}", "")

    def tell(self, answer: Answer, seconds: float) -> str | None:
        """Tell where this rank is; the first to call it waits for the others' answers and returns the report."""
        self._store.set(f"answer/{self.rank}", json.dumps(asdict(answer) | {"place": _plain(answer.place)}))
        self._store.set("told", "")
        if not self.may_report():
            return None
        finished = {rank for rank in range(self._world) if self._has(f"left/{rank}")}
        asked = [rank for rank in range(self._world) if rank not in finished]
        _wait(lambda: all(self._has(f"answer/{rank}") for rank in asked), _ANSWER_SECONDS)
        answers = {rank: self._answer_of(rank) for rank in asked if self._has(f"answer/{rank}")}
        silent = {rank: self._place_of(rank) for rank in asked if rank not in answers}
        return report(answers, silent, finished, seconds)

    def fail(self, message: str) -> bool:
        """Tell that this rank has failed; whether it is the first one, of which the others are told."""
        if self._store.add("failures", 1) > 1:
            return False
        self._store.set("failed", json.dumps([self.rank, message]))
        return True

    def failure(self) -> tuple[int, str] | None:
        """The rank that failed first, and its message."""
        if not self._has("failed"):
            return None
        rank, message = json.loads(self._store.get("failed"))
        return rank, message

    def first_failure(self) -> tuple[int, str] | None:
        """The same for a rank that has failed itself: somebody is about to tell it."""
        _wait(lambda: self._has("failed"), _SEEN_SECONDS)
        return self.failure()

    def take_note(self) -> None:
        """This rank knows who has failed. Rank 0, whose process holds the store, waits for the others to know it."""
        self._store.add("noted", 1)
        if self.rank == 0:
            _wait(lambda: self._store.add("noted", 0) >= self._world, _SEEN_SECONDS)

    def may_report(self) -> bool:
        """True on the first rank that calls it."""
        return self._store.add("reporters", 1) == 1

    def part(self, *, has_reported: bool) -> None:
        """Return when the report is printed: the end of one rank's process may end the others'.

        Rank 0, whose process holds the store, comes last: the others' connections would complain at length.
        """
        if has_reported:
            self._store.set("reported", "")
        else:
            _wait(lambda: self._has("reported"), _REPORT_SECONDS)
        self._store.add("parted", 1)
        if self.rank == 0:
            told = sum(self._has(f"answer/{rank}") for rank in range(self._world))
            _wait(lambda: self._store.add("parted", 0) >= told, _PART_SECONDS)

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _answer_of(self, rank: int) -> Answer:
        values = json.loads(self._store.get(f"answer/{rank}"))
        collectives = {key: Collectives(*value) for key, value in values["collectives"].items()}
        return Answer(Place(*values["place"]), values["seconds"], collectives, values["stack"])

    def _place_of(self, rank: int) -> Place | None:
        return Place(*json.loads(self._store.get(f"place/{rank}"))) if self._has(f"place/{rank}") else None


def _plain(place: Place) -> list[Any]:
    return [*place[:-1], list(place.samples)]


def _wait(ready: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
