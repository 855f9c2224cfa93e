"""Run a forward and a backward in turn: while one waits for communication, the other computes.

Each has a thread, and only one thread runs at a time: it gives its turn to the other just before it waits
(:func:`give_turn`). So the order depends on where the two wait, never on timing, and ranks whose passes have the same
waits start their collectives in the same order. Autograd computes the whole backward in the thread of ours, not in the
one worker thread that it has for a GPU, for which a backward inside the forward would wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from threading import Lock, Thread, get_ident

import torch
from torch.autograd.grad_mode import set_multithreading_enabled

_FORWARD, _BACKWARD = 0, 1


class _EndedError(Exception):
    """Ends a thread after the other one has failed."""


class _Turns:
    """Whose turn it is: ``thread`` runs. With ``draws``, random numbers are drawn, and each has its own generators."""

    def __init__(self, device: torch.device, *, draws: bool) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._draws = draws
        self._turn = Lock(), Lock()
        for lock in self._turn:
            lock.acquire()
        self._unfinished = {_FORWARD, _BACKWARD}
        self._has_failed = False
        self.thread = get_ident()
        self._backward_thread: int | None = None

    def begin(self, party: int) -> None:
        """Wait for the first turn of ``party``; the backward has it when the forward is ready, too."""
        with self._own_generators():
            if party == _FORWARD:
                self._turn[_BACKWARD].release()
            else:
                self._backward_thread = get_ident()
            self._take(party)

    def give(self) -> None:
        """Give the turn away and wait for the next one; do nothing if the other thread has ended."""
        party = _BACKWARD if get_ident() == self._backward_thread else _FORWARD
        if 1 - party in self._unfinished:
            with self._own_generators():
                self._turn[1 - party].release()
                self._take(party)

    def end(self, party: int, *, failed: bool) -> None:
        """Let the other thread run to its end; after an error, end it at its next turn."""
        self._unfinished.discard(party)
        self._has_failed |= failed
        if 1 - party in self._unfinished:
            self._turn[1 - party].release()

    def _take(self, party: int) -> None:
        self._turn[party].acquire()
        self.thread = get_ident()
        if self._has_failed:
            raise _EndedError

    def _own_generators(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng(self._devices) if self._draws else nullcontext()


_running: _Turns | None = None  # a process runs at most one pair


def give_turn() -> None:
    """Let the other of two passes, if any, run until it waits; call it just before waiting for communication."""
    if _running is not None:
        _running.give()


def running_thread() -> int | None:
    """Return the identifier of the thread whose turn it is; None: no pair runs."""
    return None if _running is None else _running.thread


def run_in_turns(
    forward: Callable[[], None], backward: Callable[[], None], device: torch.device, *, draws: bool
) -> None:
    """Run a forward in this thread and a backward, by autograd, in another one; the backward has the first turn.

    Neither may need a result of the other. Both compute on one stream of ``device``. ``draws``: one of them draws
    random numbers. The error of a pass is raised here; the other one ends where it waits next.
    """
    global _running
    assert _running is None, "a pair of passes runs already"
    turns = _running = _Turns(device, draws=draws)
    errors: list[BaseException] = []
    num_threads = torch.get_num_threads()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run(party: int, work: Callable[[], None]) -> None:
        failed = True
        try:
            turns.begin(party)
            work()
            failed = False
        except _EndedError:
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            turns.end(party, failed=failed)

    def run_backward() -> None:
        torch.set_num_threads(num_threads)  # a setting of each thread
        with nullcontext() if stream is None else torch.cuda.stream(stream), set_multithreading_enabled(False):
            run(_BACKWARD, backward)

    thread = Thread(target=copy_context().run, args=(run_backward,), name="backward", daemon=True)
    thread.start()
    try:
        run(_FORWARD, forward)
        thread.join()
    finally:
        _running = None
    if errors:
        raise errors[0]
