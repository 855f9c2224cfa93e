"""``make test``: three pytest sessions side by side, since ranks wait for each other much of the time.

Two sessions, each with one warm pool, take the files of tests on ranks from one queue, one after the other, and then
help the third with the other tests. Tests are imported and collected once; the sessions are forks of that process.
They share a cache of contracts. Arguments are those of pytest.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from typing import IO

import pytest

NO_TESTS = 5  # exit code of pytest where nothing was selected
CACHE = "OMNITRAIN_TEST_CACHE"  # environment variable with the folder of the contracts
FORKS = (True, False)  # whether the session has ranks; the first process has some, too


class Queue:
    """Files of tests, shared by forks: their numbers lie in a pipe, from which a session takes the next one."""

    def __init__(self, items: list[pytest.Item]) -> None:
        self._files = [list(tests) for _, tests in groupby(items, lambda item: item.path)]
        self._numbers, write = os.pipe()
        with open(write, "wb") as pipe:  # 16,384 files fit in a pipe that nobody reads yet
            pipe.write(b"".join(number.to_bytes(4, "little") for number in range(len(self._files))))

    def __iter__(self) -> Iterator[pytest.Item]:
        """Take one file after the other until none is left."""
        while number := os.read(self._numbers, 4):
            yield from self._files[int.from_bytes(number, "little")]


class SideBySide:
    """Forks a process for each session but the first, after the collection; plugin of pytest."""

    def __init__(self) -> None:
        self.is_fork = False
        self.started: dict[int, IO[bytes]] = {}  # process -> what it prints

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Start the other sessions, and run the tests that this one takes."""
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop tells of it
        on_ranks = [item for item in session.items if item.get_closest_marker("ranks")]
        others = [item for item in session.items if not item.get_closest_marker("ranks")]
        queues = [Queue(on_ranks), Queue(others)]
        for has_ranks in FORKS:
            output = tempfile.TemporaryFile()  # noqa: SIM115 -- read when its process has ended
            sys.stdout.flush()
            sys.stderr.flush()
            if process := os.fork():
                self.started[process] = output
                continue
            self.is_fork, self.started = True, {}
            _print_into(output, session)
            if not has_ranks:
                queues, session.items = queues[1:], others
            break
        _run(session, (item for queue in queues for item in queue))
        return True

    def wait(self) -> list[int]:
        """Wait for the forks, print what they printed, and return their exit codes."""
        codes = []
        for process, output in self.started.items():
            codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
            output.seek(0)
            sys.stdout.write(output.read().decode(errors="replace"))
            output.close()
        return codes


def _run(session: pytest.Session, items: Iterator[pytest.Item]) -> None:
    """Run tests as pytest's own loop does; the next one says which fixtures end."""
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following


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
    code = int(
        pytest.main(["-q", "-o", "console_output_style=classic", "-m", "not slow", *arguments], plugins=[sessions])
    )
    if sessions.is_fork:
        return code
    codes = [code, *sessions.wait()]
    shutil.rmtree(os.environ[CACHE])
    return int(any(code not in (0, NO_TESTS) for code in codes) or set(codes) == {NO_TESTS})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
