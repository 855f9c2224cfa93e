"""Let a step, or a batch of answers, finish after Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TOGETHER_SECONDS = 1.0


def heard(signals: Iterable[int]) -> list[int]:
    """Return those of ``signals`` that this process handles: all, without a hang-up under ``nohup``."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    return [number for number in signals if number not in ignored]


class StoppedError(Exception):
    """All ranks stopped their work because of a signal."""


class Interrupt:
    """Within this context the first Ctrl-C (SIGTERM, hang-up) only sets :attr:`requested`; the second one interrupts.

    A terminal sends Ctrl-C to every process of the command, and a launcher forwards it to its ranks, so signals within
    one second of the first count as the first. Under ``nohup`` a hang-up is ignored. A later SIGTERM never interrupts:
    schedulers repeat it while a run saves, and have SIGKILL for the end of their patience.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._first: float | None = None
        self._number: int | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal arrived."""
        return self._first is not None

    @property
    def is_terminated(self) -> bool:
        """Whether the first signal was SIGTERM, which schedulers send."""
        return self._number == signal.SIGTERM

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in heard(_SIGNALS)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first, self._number = time.monotonic(), number
        elif number != signal.SIGTERM and time.monotonic() - self._first > TOGETHER_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
