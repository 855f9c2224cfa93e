"""Callbacks of a run: the user's code that the trainer calls after a step, a save, an evaluation."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnitrain.errors import TrainingError, UserError
from omnitrain.peers import Peers
from omnitrain.recipe.functions import load_function
from omnitrain.recipe.suggest import hint
from omnitrain.train.evaluate.evaluate import EvaluationResult

KEY = "train.callbacks"


class CallbackError(TrainingError):
    """A callback raised; the message names it, its event and the step. The run ends on all ranks."""


class Callback:
    """What a run does besides training. Subclass it, and write the methods that you need.

    Every rank has its own callback and calls its methods, in the order of the list. ``trainer`` is the
    :class:`Trainer`: its ``step``, ``recipe``, ``model``, ``optimizer``, ``folder.path``; ``trainer.ranks.is_first`` is
    true on one rank, which should print and write; ``trainer.stop(reason)``, on any rank, ends the run after this step
    on all ranks. A method that raises ends the run on all ranks, with a checkpoint.
    """

    def on_start(self, trainer: Any) -> None:
        """Called before the first step of a run, a resumed run included."""

    def on_step(self, trainer: Any, loss: float, grad_norm: float) -> None:
        """Called after each optimizer step, with the total loss of all ranks and the gradient norm before clipping."""

    def on_log(self, trainer: Any, line: dict[str, Any]) -> None:
        """Called before a line is written to ``metrics.jsonl``. Numbers that the first rank adds are written, too."""

    def on_evaluate(self, trainer: Any, result: EvaluationResult) -> None:
        """Called after an evaluation. Without generation, there are only ``result.losses``."""

    def on_save(self, trainer: Any, folder: Path) -> None:
        """Called after a checkpoint is complete in ``folder``, which may belong to an earlier step."""

    def on_end(self, trainer: Any, summary: Any) -> None:
        """Called at the end of :meth:`Trainer.fit`, with the :class:`RunSummary` that it returns; not after errors."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Make the callbacks that ``train.callbacks`` names: classes, or functions that return a callback."""
    made = []
    for name in names:
        make = load_function(name, KEY)
        try:
            made.append(make())
        except Exception as error:  # a user's code may fail in any way
            raise UserError(
                f"{KEY}: {name!r} cannot be called without arguments ({type(error).__name__}: {error})"
            ) from None
    return made


class Callbacks:
    """Callbacks on one rank, in order; UserError: no :class:`Callback`, no such event, other ones on other ranks."""

    def __init__(self, callbacks: Sequence[Callback], peers: Peers) -> None:
        for callback in callbacks:
            _require_callback(callback)
        names = [type(callback).__name__ for callback in callbacks]
        if peers.any(names != peers.of_first(names)):  # they would wait for each other forever
            raise UserError(
                f"{KEY}: the ranks have different callbacks (this one: {', '.join(names) or 'none'}); give all ranks "
                "the same ones, which may print and write only where `trainer.ranks.is_first`"
            )
        self._peers = peers
        self._of_event = {
            event: [one for one in callbacks if getattr(type(one), event) is not getattr(Callback, event)]
            for event in EVENTS
        }

    def has(self, event: str) -> bool:
        """Whether a callback has a method for ``event``; the same on all ranks."""
        return bool(self._of_event[event])

    def call(self, event: str, trainer: Any, *arguments: Any) -> None:
        """Call the methods for ``event`` on all ranks; raise a CallbackError on all if one raised on some rank."""
        failure: tuple[str, Exception] | None = None
        for callback in self._of_event[event]:
            try:
                getattr(callback, event)(trainer, *arguments)
                if event == "on_log":  # what cannot be written must not fail later, without the name of the callback
                    json.dumps(arguments[0])
            except Exception as error:  # raised again below, after the other ranks know
                failure = (_failure(callback, event, trainer.step, error), error)
                break
        if not self.has(event) or not self._peers.any(failure is not None):
            return
        told = self._peers.gather(None if failure is None else failure[0])
        rank, message = next((rank, message) for rank, message in enumerate(told) if message is not None)
        # Rank 0's message stays verbatim, so that equal messages are printed once.
        raise CallbackError(message if rank == 0 else f"rank {rank}: {message}") from failure and failure[1]


def _require_callback(callback: Any) -> None:
    if not isinstance(callback, Callback):
        raise UserError(
            f"{KEY}: found a {type(callback).__name__}; expected an object of a class that inherits from "
            "omnitrain.Callback"
        )
    for name in dir(callback):
        if name.startswith("on_") and name not in EVENTS and callable(getattr(callback, name)):
            raise UserError(f"{KEY}: {type(callback).__name__}.{name}: no such event; {hint(name, EVENTS)}")


def _failure(callback: Callback, event: str, step: int, error: Exception) -> str:
    """Say what failed, and in which line of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    name = f"{type(callback).__name__}.{event}"
    return f"the callback {name} failed after step {step}: {type(error).__name__}: {error}{place}"
