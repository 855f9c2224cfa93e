"""Ctrl-C that lets a step finish, or a batch of answers."""

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
    """Those of ``signals`` that this process answers: a hang-up not where ``nohup`` has it ignore that."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    return [number for number in signals if number not in ignored]


class StoppedError(Exception):
    """Work was left, on all ranks alike, because a signal asked for it."""


class Interrupt:
    """Within this context the first Ctrl-C (SIGTERM, hang-up) only sets :attr:`requested`; the second one interrupts.

    A terminal sends Ctrl-C to every process of the command, and a launcher hands it on to its ranks: signals that
    arrive within a second of the first one are the first one. Under ``nohup`` a hang-up is no signal.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._first: float | None = None

    @property
    def requested(self) -> bool:
        """There was a signal."""
        return self._first is not None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in heard(_SIGNALS)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = time.monotonic()
        elif time.monotonic() - self._first > TOGETHER_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
