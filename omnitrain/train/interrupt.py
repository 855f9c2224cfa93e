"""Let a step, or a batch of answers, finish after Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TOGETHER_SECONDS = 1.0
_SAID = b"omnitrain: ends and saves after this step; Ctrl-C again stops at once, and loses what is not saved\n"


@contextmanager
def handled(signals: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let ``handler`` handle ``signals`` within this context; under ``nohup`` a hang-up stays ignored."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {number: signal.signal(number, handler) for number in signals if number not in ignored}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


class StoppedError(Exception):
    """All ranks stopped their work because of a signal."""


class Interrupt:
    """Within this context the first Ctrl-C (SIGTERM, hang-up) only sets :attr:`requested`; the second one interrupts.

    A terminal sends Ctrl-C to every process of the command, and a launcher forwards it to its ranks, so signals within
    one second of the first count as the first. Under ``nohup`` a hang-up is ignored. A later SIGTERM never interrupts:
    schedulers repeat it while a run saves, and have SIGKILL for the end of their patience.
    """

    def __init__(self) -> None:
        self._handling = ExitStack()
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
            self._handling.enter_context(handled(_SIGNALS, self._note))
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first, self._number = time.monotonic(), number
            if os.environ.get("RANK", "0") == "0":
                os.write(2, _SAID)  # a handler must not use buffered streams
        elif number != signal.SIGTERM and time.monotonic() - self._first > TOGETHER_SECONDS:
            self._handling.close()
            signal.raise_signal(number)
