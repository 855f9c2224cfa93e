"""The command that continues an interrupted run, for the user to paste."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from omnitrain.train.launch.environment import LAUNCHER, world_size


def resume_hint(folder: str) -> str:
    """Return how to continue the run of this process, or of this rank; its recipe has all overrides."""
    is_launched = LAUNCHER in os.environ  # by `omnitrain run --nproc`
    ranks = ["--nproc", str(world_size())] if is_launched else []
    command = shlex.join(["run", folder, *ranks])
    if world_size() > 1 and not is_launched:
        return f"to continue, start `-m omnitrain {command}` in place of `-m omnitrain run ...`"
    found = shutil.which("omnitrain")
    is_ours = found is not None and Path(found).parent == Path(sys.executable).parent
    program = ["omnitrain"] if is_ours else [sys.executable, "-m", "omnitrain"]
    return f"to continue: {shlex.join(program)} {command}"
