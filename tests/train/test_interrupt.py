from __future__ import annotations

import signal

import pytest

from omnitrain.train import interrupt
from omnitrain.train.interrupt import Interrupt, handled


def test_signals_that_come_together_are_one_and_a_later_one_interrupts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    now = 0.0
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now)
    with Interrupt() as asked:
        assert not asked.requested
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
            assert asked.requested
            now += 0.4
        told = capfd.readouterr().err  # before someone presses again while it saves
        assert (
            told
            == "omnitrain: ends and saves after this step; Ctrl-C again stops at once, and loses what is not saved\n"
        )
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_a_repeated_sigterm_lets_a_save_finish_and_ctrl_c_still_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    now = 0.0
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now)
    with Interrupt() as asked:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
            now += 30
        assert asked.requested and asked.is_terminated
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_handlers_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupt():
        pass
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_hang_up_stops_nothing_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt() as asked:
        signal.raise_signal(signal.SIGHUP)
        assert not asked.requested
    signals: list[int] = []
    with handled([signal.SIGHUP], lambda number, _: signals.append(number)):
        signal.raise_signal(signal.SIGHUP)
        assert signals == []
    assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN
