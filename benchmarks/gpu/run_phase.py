"""The process of one phase: writes each figure as a line of JSON as soon as the phase has it."""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import time
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Run the phase that the command line names."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("module")
    options.add_argument("figures", type=Path, help="file that gets the figures")
    options.add_argument("folder", type=Path, help="folder for traces; it becomes the working folder's OUTPUT")
    options.add_argument("stacks_at", type=float, help="second of time.time at which the stacks are printed")
    options.add_argument("--tiny", action="store_true")
    given = options.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.01, given.stacks_at - time.time()))
    with given.figures.open("w") as lines:
        for name, value in import_module(given.module).run(given.tiny, given.folder):
            lines.write(
                json.dumps([name, value if isinstance(value, str) or math.isfinite(value) else str(value)]) + "\n"
            )
            lines.flush()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
