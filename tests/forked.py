"""Processes of their own, forked by the server of ranks: it has imported all, for which a new process takes 5 s."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from omnitrain.cli.main import app


class Forked:
    """A function that runs in a process of its own, and prints into the file ``printed``."""

    def __init__(self, printed: Path, function: Callable[..., Any], *arguments: Any) -> None:
        self._printed = printed
        context = multiprocessing.get_context("forkserver")
        self.process: BaseProcess = context.Process(target=_printing_into, args=(printed, function, *arguments))
        self.process.start()

    @property
    def told(self) -> str:
        return self._printed.read_text() if self._printed.is_file() else ""

    def wait_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            assert self.process.is_alive(), self.told
            time.sleep(0.005)

    def ended(self) -> tuple[int | None, str]:
        """Wait for the end of the process; its exit code (of a signal: negative), and what it printed."""
        self.process.join(120)
        return self.process.exitcode, self.told


def omnitrain(*words: str) -> None:
    """The command ``omnitrain WORDS``."""
    sys.argv = ["omnitrain", *words]
    app(prog_name="omnitrain")


def _printing_into(printed: Path, function: Callable[..., Any], *arguments: Any) -> None:
    with printed.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    function(*arguments)
