"""``make test-versions``: a short suite with the lowest and with the highest versions that omnitrain is tested with.

Each pair of torch and transformers has an environment of its own in ``.versions``, with a wheel of omnitrain. One takes
about 6 GB, as PyPI has torch's builds for GPUs, which run on a CPU, too. Tests run on the checkout; ``omnitrain check``
and ``omnitrain run`` are those of the wheel.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from omnitrain.packages import WINDOW
from tests.test_wheel import ROOT, built_wheel

FOLDER = ROOT / ".versions"
SUITE = """
    tests/test_private_names.py tests/test_package.py tests/test_groups.py
    tests/checkpoint tests/optim tests/ops/compile
    tests/models/hf tests/models/foundation tests/models/omni/test_generate.py
    tests/parallel/fsdp tests/parallel/pipeline tests/parallel/memory tests/parallel/schedule/test_steps.py
    tests/parallel/expert tests/parallel/sections/test_queue.py tests/parallel/sections/test_training.py
"""
_FEW_STEPS = ("train.steps=3", "evaluation.examples_per_source=4")
_OF_PAIRS = ("torch", "torchao", "transformers", "setuptools")  # not as in constraints.txt
# Run by an environment's Python: fails unless it has all that its arguments require, and omnitrain with `dev`.
HAS_ALL = """
import sys
from importlib.metadata import requires, version
from packaging.requirements import Requirement
for asked in map(Requirement, [*sys.argv[1:], *requires("omnitrain")]):
    if asked.marker is None or asked.marker.evaluate({"extra": "dev"}):
        sys.exit(f"{asked}, not {version(asked.name)}") if version(asked.name) not in asked.specifier else None
"""


def installed(torch: str, transformers: str) -> Path:
    """Return the folder of programs of the environment of a pair of minor versions, made or completed if need be.

    An environment of an earlier call that has all packages gets the new wheel alone, and pip asks no index.
    """
    programs = FOLDER / f"{torch}-{transformers}" / "bin"
    if not programs.exists():
        venv.create(programs.parent, with_pip=True)
    pip = [programs / "python", "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-cache-dir"]
    pair = (f"torch=={torch}.*", f"transformers=={transformers}.*")
    with tempfile.TemporaryDirectory() as folder:
        wheel, others = built_wheel(Path(folder)), Path(folder) / "constraints.txt"
        subprocess.run([*pip, "--no-deps", "--force-reinstall", wheel], check=True)  # that of an earlier call is as new
        if subprocess.run([programs / "python", "-c", HAS_ALL, *pair], capture_output=True).returncode:
            pins = (ROOT / "constraints.txt").read_text().splitlines()
            others.write_text("\n".join(pin for pin in pins if pin.partition("==")[0] not in _OF_PAIRS))
            subprocess.run([*pip, "-c", others, *pair, f"{wheel}[dev]"], check=True)
    return programs


def passes(programs: Path) -> bool:
    """Whether the suite passes in an environment, and ``check`` and a few steps of the quickstart succeed."""
    with tempfile.TemporaryDirectory() as folder:
        commands = (
            [programs / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITE.split()],
            [programs / "omnitrain", "check", "quickstart"],
            [programs / "omnitrain", "run", "quickstart", *_FEW_STEPS, f"output_dir={folder}/run"],
        )
        return not any(subprocess.run(command, cwd=ROOT).returncode for command in commands)


def main() -> int:
    """Run both pairs; 0 if all passed."""
    failed = []
    for pair in zip(*(WINDOW[package] for package in ("torch", "transformers")), strict=True):
        programs, started = installed(*pair), time.monotonic()
        outcome = "passed" if passes(programs) else "failed"
        failed += [pair] * (outcome == "failed")
        print(f"torch {pair[0]}, transformers {pair[1]}: {outcome} in {time.monotonic() - started:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
