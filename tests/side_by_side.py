"""``make test``: three pytest sessions side by side, since ranks wait for each other much of the time.

The sessions run the tests without ranks, the tests of ``tests/parallel`` on ranks, and all other tests on ranks. Each
session on ranks has one warm pool. Arguments are those of pytest.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack

NO_TESTS = 5  # exit code of pytest where nothing was selected
SESSIONS = ("ranks and not runs", "ranks and runs", "not ranks")


def main(arguments: list[str]) -> int:
    """Run all sessions; 0 if all passed. The first one prints at once, the others when it has ended."""
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in SESSIONS[1:]]
        first, *others = (_session(marks, arguments) for marks in SESSIONS)
        started = [
            subprocess.Popen(c, stdout=o, stderr=subprocess.STDOUT) for c, o in zip(others, outputs, strict=True)
        ]
        try:
            codes = [subprocess.run(first, check=False).returncode, *(process.wait() for process in started)]
        finally:
            for process, output in zip(started, outputs, strict=True):
                process.terminate()
                process.wait()
                output.seek(0)
                sys.stdout.write(output.read().decode(errors="replace"))
    return int(any(code not in (0, NO_TESTS) for code in codes) or set(codes) == {NO_TESTS})


def _session(marks: str, arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-m", f"not slow and {marks}", *arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
