from __future__ import annotations

import signal
import sys
import time
import weakref
from typing import Any

import pytest

from omnitrain.cli.ctrl_c import raised_again_where_lost


class Thing:
    pass


def test_ctrl_c_in_a_callback_that_swallows_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    before = sys.unraisablehook
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with raised_again_where_lost():
            thing = Thing()
            callback = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                del thing
                time.sleep(5)
            assert callback() is None and not told
            other = Thing()
            failing = weakref.ref(other, lambda _: 1 / 0)
            del other
            assert failing() is None and told[0].exc_type is ZeroDivisionError
    finally:
        signal.signal(signal.SIGINT, handler)
    assert sys.unraisablehook is before
