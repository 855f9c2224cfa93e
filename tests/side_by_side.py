"""``make test``: three pytest sessions side by side, since ranks wait for each other much of the time.

Two sessions run the tests on ranks, each with one warm pool, and one the other tests. Tests are imported and collected
once; the sessions are forks of that process. They share a cache of contracts. Arguments are those of pytest.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest

NO_TESTS = 5  # exit code of pytest where nothing was selected
CACHE = "OMNITRAIN_TEST_CACHE"  # environment variable with the folder of the contracts
SESSIONS = RANKS, MORE_RANKS, ALONE = "ranks", "more ranks", "alone"
TESTS = Path(__file__).parent
OF_MORE_RANKS = ("schedule", "pipeline", "verify")  # folders of tests/parallel; chosen so that both take as long


def session_of(item: pytest.Item) -> str:
    """Return the name of the session that runs a test."""
    room, *rest = item.path.relative_to(TESTS).parts
    if item.get_closest_marker("ranks") is None:
        return ALONE
    return RANKS if room == "parallel" and rest[0] not in OF_MORE_RANKS else MORE_RANKS


class SideBySide:
    """Forks a process for each session but the first, after the collection; plugin of pytest."""

    def __init__(self) -> None:
        self.is_fork = False
        self.started: dict[int, IO[bytes]] = {}  # process -> what it prints

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Keep the tests of one session in this process, and start the others."""
        if session.testsfailed or session.config.option.collectonly:
            return
        own, *others = SESSIONS
        for name in others:
            output = tempfile.TemporaryFile()  # noqa: SIM115 -- read when its process has ended
            sys.stdout.flush()
            sys.stderr.flush()
            if process := os.fork():
                self.started[process] = output
                continue
            self.is_fork, self.started, own = True, {}, name
            _print_into(output, session)
            break
        kept = [item for item in session.items if session_of(item) == own]
        session.config.hook.pytest_deselected(items=[item for item in session.items if session_of(item) != own])
        session.items, session.testscollected = kept, len(kept)

    def wait(self) -> list[int]:
        """Wait for the forks, print what they printed, and return their exit codes."""
        codes = []
        for process, output in self.started.items():
            codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
            output.seek(0)
            sys.stdout.write(output.read().decode(errors="replace"))
            output.close()
        return codes


def _print_into(output: IO[bytes], session: pytest.Session) -> None:
    """Send what this process prints to a file; pytest restores the descriptors that it knew when capturing began."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    capture.start_global_capturing()
    capture.suspend_global_capture()


def main(arguments: list[str]) -> int:
    """Run all sessions; 0 if all passed. The first one prints at once, the others when it has ended."""
    sessions = SideBySide()
    os.environ[CACHE] = tempfile.mkdtemp()
    code = int(pytest.main(["-q", "-m", "not slow", *arguments], plugins=[sessions]))
    if sessions.is_fork:
        return code
    codes = [code, *sessions.wait()]
    shutil.rmtree(os.environ[CACHE])
    return int(any(code not in (0, NO_TESTS) for code in codes) or set(codes) == {NO_TESTS})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
