"""Raise a Ctrl-C that arrives where Python cannot raise it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SECONDS = 0.02  # by then, the callback that swallowed the interrupt has returned


@contextmanager
def raised_again_where_lost() -> Iterator[None]:
    """Within this context, repeat a ``KeyboardInterrupt`` that Python swallows, until it reaches the program.

    A signal may arrive inside a weak reference's callback or ``__del__``, where Python prints an exception and drops
    it. Collecting the garbage of half a million objects spends a long time in such callbacks.
    """
    previous_hook = sys.unraisablehook

    def repeat_interrupt(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            previous_hook(unraisable)
            return
        timer = threading.Timer(_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = repeat_interrupt
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook
