"""Whether kernels of several streams race: tiny steps under torch's CUDA sanitizer, which knows what each one reads."""

from __future__ import annotations

import traceback
from pathlib import Path

from torch.cuda import _sanitizer

from gpu.measured import NEEDS_CUDA, Figures, free_memory, this_device
from gpu.tiny_steps import PLAIN, STEPS


def run(tiny: bool, folder: Path) -> Figures:
    """Yield 0 for each kind of step without a race; fail at the end if one has one.

    A CPU has no streams: there the plain steps run, without a figure.
    """
    device, wrong = this_device(), list[str]()
    if device.type == "cuda":
        _sanitizer.enable_cuda_sanitizer()  # what TORCH_CUDA_SANITIZER=1 does
    for name, step in STEPS.items():
        problem = step.obstacle(device)
        if device.type != "cuda" and name not in PLAIN:
            problem = NEEDS_CUDA
        elif step.plan.get("compile"):
            problem = "the sanitizer does not see compiled kernels"
        if problem is not None:
            yield f"races of {name}", problem
            continue
        try:
            with step.on(device, "bfloat16") as (made, packs):
                for pack in packs[:2]:
                    made.run([pack])
            found: float | str = 0.0 if device.type == "cuda" else NEEDS_CUDA
        except Exception as error:  # races, or anything that the sanitizer does not bear
            traceback.print_exc()
            races = [str(one) for one in getattr(error, "errors", ())]
            found = (
                f"{len(races)} races: {races[0][:300]}" if races else f"failed: {' '.join(str(error).split())[:300]}"
            )
            wrong.append(name)
        yield f"races of {name}", found
        free_memory(device)
    if wrong:
        raise SystemExit(f"races: {', '.join(wrong)}")
