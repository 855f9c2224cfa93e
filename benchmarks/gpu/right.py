"""Whether what the device computes is right: each figure is a deviation as a multiple of what rounding explains.

Above 1, it is an error. A check that cannot run here has the reason in place of the figure, never a number.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from gpu import checks_of_ops, checks_of_steps
from gpu.checks_of_ops import Check
from gpu.measured import NEEDS_CUDA, Figures, free_memory, this_device

COMPILED = (" flex ", "compile")  # in names of checks
torch.backends.cudnn.allow_tf32 = False  # of convolutions; that of products is off by default


def checks() -> list[Check]:
    """Return all checks; those of whole steps first, and what compiles last, since it takes long."""
    found = [*checks_of_steps.checks(), *checks_of_ops.checks()]
    return sorted(found, key=lambda check: any(word in check.name for word in COMPILED))


def run(tiny: bool, folder: Path) -> Figures:
    """Yield the deviation of each check; fail at the end if one is wrong."""
    device, wrong = this_device(), list[str]()
    torch.set_num_threads(1 if tiny else torch.get_num_threads())
    for check in checks():
        if (problem := check.obstacle(device)) is not None:
            yield check.name, NEEDS_CUDA if "only on CUDA" in problem else problem
            continue
        try:
            found: float | str = check.measure(device)
        except Exception as error:  # of any kernel: the other checks go on
            traceback.print_exc()
            found = f"failed: {' '.join(str(error).split()) or type(error).__name__}"[:300]
        if isinstance(found, str) or not found <= 1:
            wrong.append(check.name)
        yield check.name, found
        free_memory(device)
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")
