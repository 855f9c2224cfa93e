"""Download the wheels that ``make gpu`` needs and a machine without a network, which has torch alone, usually lacks.

Run it where there is a network, for the Python of that machine, and copy the folder into the checkout there, where
phases find it. Versions are those of ``constraints.txt``. ``--also NAME`` adds a package that is missing, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    *("transformers", "accelerate", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *("datasets", "dill", "multiprocess", "soundfile", "cffi", "pycparser", "liger-kernel"),
)


def command(python: str, platforms: Sequence[str], names: Sequence[str], folder: Path) -> list[str]:
    """Return the command of pip that downloads the wheels, each without what it depends on.

    Args:
        python: version of the machine's Python, such as ``3.12``.
        platforms: tags of the platform, the newest first.
        names: of packages.
        folder: gets the wheels.
    """
    tags = [word for tag in platforms for word in ("--platform", tag)]
    options = ["--no-deps", "--only-binary", ":all:", "--python-version", python, *tags]
    where = ["--constraint", str(ROOT / "constraints.txt"), "--dest", str(folder)]
    return [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *options, *where, *names]


def main() -> None:
    """Download, and print the sizes."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="of the machine"
    )
    options.add_argument("--machine", default="x86_64", help="its processor, as uname -m prints it")
    options.add_argument("--also", action="append", default=[], help="one more package")
    options.add_argument("--output", type=Path, default=ROOT / "gpu_wheels", help="folder of the wheels")
    given = options.parse_args()
    platforms = [f"manylinux_2_{minor}_{given.machine}" for minor in (28, 17)] + [f"manylinux2014_{given.machine}"]
    given.output.mkdir(parents=True, exist_ok=True)
    subprocess.run(command(given.python, platforms, [*NAMES, *given.also], given.output), check=True)
    wheels = sorted(given.output.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:8.2f} MiB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 2**20:8.2f} MiB  in {given.output}")


if __name__ == "__main__":
    main()
