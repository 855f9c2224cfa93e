"""``make test``: tests on ranks and all others, side by side, as ranks wait for each other much of the time.

Two sessions, so that all tests on ranks have one warm pool. Arguments are those of pytest.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

NO_TESTS = 5  # exit code of pytest where nothing was selected


def main(arguments: list[str]) -> int:
    """Run both; 0 if both passed. What the second says is shown when the first has ended."""
    with tempfile.TemporaryFile() as said:
        others = subprocess.Popen(_session("not slow and not ranks", arguments), stdout=said, stderr=subprocess.STDOUT)
        try:
            codes = [subprocess.run(_session("not slow and ranks", arguments), check=False).returncode, others.wait()]
        finally:
            others.terminate()
            others.wait()
            said.seek(0)
            sys.stdout.write(said.read().decode(errors="replace"))
    return int(any(code not in (0, NO_TESTS) for code in codes) or codes == [NO_TESTS, NO_TESTS])


def _session(marks: str, arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-m", marks, *arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
