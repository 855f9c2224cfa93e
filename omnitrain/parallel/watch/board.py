"""Share the positions, failures and reports of ranks through a store, without collectives."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from omnitrain.parallel.watch.report import Place, RankStatus, report

_ANSWER_SECONDS = 5.0
_REPORT_SECONDS = 10.0
_PART_SECONDS = 1.0
_SEEN_SECONDS = 5.0
_POLL_SECONDS = 0.05


class StallBoard:
    """One rank's access to the shared store. Methods raise RuntimeError if the process that holds the store ended."""

    def __init__(self, store: dist.Store, name: str, rank: int, world: int) -> None:
        """``name`` must be the same on all ranks, and unused before."""
        self.rank = rank
        shared: Any = store  # torch's type stubs lack `clone`, and values that are bytes
        # Another connection, so that other callers cannot block it.
        self._store: Any = dist.PrefixStore(name, shared.clone())
        self._world = world
        self._last: Place | None = None

    def note(self, place: Place, moves: int) -> int:
        """Store this rank's position, in case the process dies; add ``moves`` and return the total of all ranks."""
        if place is not self._last:
            self._set(f"place/{self.rank}", place)
            self._last = place
        return int(self._store.add("moves", moves))

    def is_reported(self) -> bool:
        """Return whether a rank has detected a stall."""
        return self._store.check(["stalled"])

    def leave(self) -> None:
        """Note that this rank has left the loop."""
        self._store.set(f"left/{self.rank}", "")

    def tell(self, answer: RankStatus, seconds: float) -> str | None:
        """Store this rank's answer; the first caller waits for the other answers and returns the report."""
        self._set(f"answer/{self.rank}", answer)
        self._store.set("stalled", "")
        if not self.may_report():
            return None
        finished = {rank for rank in range(self._world) if self._has(f"left/{rank}")}
        running = [rank for rank in range(self._world) if rank not in finished]
        _wait(lambda: all(self._has(f"answer/{rank}") for rank in running), _ANSWER_SECONDS)
        found = {rank: self._get(f"answer/{rank}") for rank in running}
        answers = {rank: answer for rank, answer in found.items() if answer is not None}
        silent = {rank: self.last_place(rank) for rank, answer in found.items() if answer is None}
        return report(answers, silent, finished, seconds)

    def last_place(self, rank: int) -> Place | None:
        """Return the position that a rank stored last; None: it stored none."""
        place: Place | None = self._get(f"place/{rank}")
        return place

    def fail(self, message: str) -> bool:
        """Report that this rank has failed; return whether it is the first. Only the first message is stored."""
        if self._store.add("failures", 1) > 1:
            return False
        self._set("failed", (self.rank, message))
        return True

    def failure(self) -> tuple[int, str] | None:
        """Return the rank that failed first and its message; None: no rank has failed."""
        found: tuple[int, str] | None = self._get("failed")
        return found

    def first_failure(self) -> tuple[int, str] | None:
        """Like :meth:`failure`, for a rank that has failed: wait until the first one has stored its message."""
        _wait(lambda: self._has("failed"), _SEEN_SECONDS)
        return self.failure()

    def take_note(self, *, is_one_gone: bool = False) -> None:
        """Confirm that this rank has read the failure. Rank 0, which holds the store, waits for all confirmations.

        If one rank has ended, it waits only briefly, because a launcher that sees this will end rank 0, too.
        """
        self._store.add("noted", 1)
        if self.rank == 0:
            expected, seconds = (self._world - 1, _PART_SECONDS) if is_one_gone else (self._world, _SEEN_SECONDS)
            _wait(lambda: self._store.add("noted", 0) >= expected, seconds)

    def may_report(self) -> bool:
        """Return True on the first rank that calls it."""
        return self._store.add("reporters", 1) == 1

    def part(self, *, has_reported: bool) -> None:
        """Wait until the report is printed, because the end of one rank's process may end the others.

        Rank 0, which holds the store, returns last, so that the others print no connection errors.
        """
        if has_reported:
            self._store.set("reported", "")
        else:
            _wait(lambda: self._has("reported"), _REPORT_SECONDS)
        self._store.add("parted", 1)
        if self.rank == 0:
            answered = sum(self._has(f"answer/{rank}") for rank in range(self._world))
            _wait(lambda: self._store.add("parted", 0) >= answered, _PART_SECONDS)

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _get(self, key: str) -> Any:
        """What a rank of this run has set; None: nothing."""
        return pickle.loads(self._store.get(key)) if self._has(key) else None

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))


def _wait(ready: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
