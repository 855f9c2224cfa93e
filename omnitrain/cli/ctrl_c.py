"""Ctrl-C where Python cannot raise it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SECONDS = 0.02  # the callback in which it was lost is over by then


@contextmanager
def raised_again_where_lost() -> Iterator[None]:
    """Inside, a ``KeyboardInterrupt`` that Python would print and forget is raised once more, until it is heard.

    Signals come anywhere, and in a weak reference's callback or in ``__del__`` nothing can be raised. Collecting the
    garbage of half a million objects is a long time in such callbacks.
    """
    before = sys.unraisablehook

    def told(lost: Any) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            before(lost)
            return
        again = threading.Timer(_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = told
    try:
        yield
    finally:
        sys.unraisablehook = before
