"""The command that continues an interrupted run, for the user to paste."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from omnitrain.train.launch.environment import LAUNCHER, world_size


def resume_hint(recipe: str, overrides: Sequence[str]) -> str:
    """Return how to continue the run that this process, or this rank, was started for.

    Args:
        recipe: the recipe as given on the command line.
        overrides: the overrides as given.
    """
    is_launched = LAUNCHER in os.environ  # by `omnitrain run --nproc`
    if world_size() > 1 and not is_launched:
        return "to continue, start the same command again with --resume at its end"
    found = shutil.which("omnitrain")
    is_ours = found is not None and Path(found).parent == Path(sys.executable).parent
    program = ["omnitrain"] if is_ours else [sys.executable, "-m", "omnitrain"]
    ranks = ["--nproc", str(world_size())] if is_launched else []
    return f"to continue: {shlex.join([*program, 'run', recipe, *overrides, *ranks, '--resume'])}"
