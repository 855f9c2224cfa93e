"""One visit to a machine with one NVIDIA GPU: what works there, how fast it is, and where it waits.

Each phase (a module of ``gpu/``) is a process with a limit of its own. What a phase has found is written to
``gpu_day.json`` when the phase ends, also if it fails, crashes or is killed; the other phases go on. docs/gpu.md says
what each figure means. This file needs nothing but Python, so that it can tell what does not even import.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[1]
RESULT = "gpu_day.json"
WHEELS = ROOT / "gpu_wheels"  # of gpu/pack_wheels.py
LINES = 40  # of what a phase printed, kept where it did not end well
MOST_FILES, MOST_BYTES = 8, 16 * 2**20

BEFORE_LIMIT = 0.9  # of a phase's limit, when the stacks of its threads are printed: what it waits for
OK, FAILED, KILLED, LATE = "ok", "failed", "killed", "late"


@dataclass(frozen=True)
class Phase:
    """A part of the visit.

    Attributes:
        module: has ``run(tiny)``; its last part is the name.
        limit: seconds after which the phase is ended, from the start of its process.
    """

    module: str
    limit: float

    @property
    def name(self) -> str:
        """What ``--only`` and the result call it."""
        return self.module.rpartition(".")[2]


PHASES = (
    Phase("gpu.machine", 25),
    Phase("gpu.right", 130),
    Phase("gpu.races", 35),
    Phase("gpu.waits", 30),
    Phase("gpu.dense", 95),
    Phase("gpu.experts", 85),
    Phase("gpu.media", 40),
    Phase("gpu.profile", 40),
)
TINY_LIMIT = 600.0  # of a phase; it is of a CPU that does other work, too


@dataclass
class Found:
    """What a phase found.

    Attributes:
        status: ``ok``; ``failed``: it says what is wrong; ``killed``: by a signal; ``late``: ended at its limit.
        seconds: from start to end of its process.
        exit_code: of its process, negative: the signal that ended it; None: none, it was ended at its limit.
        figures: name -> a number; or words, where there is none: why it was not measured.
        said: the last lines that it printed, with the stacks of its threads, where it did not end well.
    """

    status: str
    seconds: float
    exit_code: int | None
    figures: dict[str, float | str]
    said: list[str]


@dataclass
class Day:
    """The content of ``gpu_day.json``.

    Attributes:
        tiny: all sizes were tiny: nothing here is a measurement.
        python: version of Python.
        platform: system and processor.
        commit: of the repository; empty where git does not tell.
        phases: name -> what it found.
        files: name -> size in bytes of each file in the folder of the result.
        left_out: name -> bytes of each file that is not there, since it is too large, or since there are too many.
    """

    tiny: bool
    python: str = field(default_factory=platform.python_version)
    platform: str = field(default_factory=platform.platform)
    commit: str = field(default_factory=lambda: _commit())
    phases: dict[str, Found] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def take(self, name: str, found: Found, made: Path, folder: Path) -> None:
        """Add what a phase found, copy the files that it made, unless too many or too large, and rewrite the result."""
        self.phases[name] = found
        for file in sorted(made.iterdir()):
            size, known = file.stat().st_size, file.name in self.files
            if size > MOST_BYTES or (len(self.files) >= MOST_FILES and not known):
                self.left_out[file.name] = size
            else:
                self.files[file.name] = size
                shutil.copyfile(file, folder / file.name)
        new = folder / f"{RESULT}.new"
        new.write_text(json.dumps(asdict(self), indent=2, allow_nan=False) + "\n")
        new.replace(folder / RESULT)


def run_day(phases: Sequence[Phase], folder: Path, *, tiny: bool, at_once: int = 1) -> Day:
    """Run the phases, and rewrite the result in ``folder`` after each.

    Args:
        phases: in their order.
        folder: is made.
        tiny: see :class:`Day`.
        at_once: number of phases that may run at a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    day, lock = Day(tiny), Lock()
    with tempfile.TemporaryDirectory(prefix="omnitrain-gpu-") as cache, ThreadPoolExecutor(at_once) as pool:
        environment = _environment(cache)

        def run(phase: Phase) -> None:
            with tempfile.TemporaryDirectory(prefix="omnitrain-gpu-") as own:
                made = Path(own) / "files"
                made.mkdir()
                found = run_phase(phase, Path(own), made, environment, tiny)
                with lock:
                    day.take(phase.name, found, made, folder)
            print(f"{phase.name}: {found.status} after {found.seconds:.0f} s", flush=True)

        list(pool.map(run, phases))
    return day


def run_phase(phase: Phase, own: Path, made: Path, environment: Mapping[str, str], tiny: bool) -> Found:
    """Run one phase to its end or to its limit, and end all processes that it started.

    Args:
        phase: to run.
        own: an empty folder.
        made: a folder for its traces.
        environment: of its process.
        tiny: see :class:`Day`.
    """
    figures, said = own / "figures", own / "said"
    stacks_at = time.time() + BEFORE_LIMIT * phase.limit
    command = [sys.executable, "-m", "gpu.run_phase", phase.module, str(figures), str(made), str(stacks_at)]
    began = time.perf_counter()
    with said.open("wb") as output:
        process = subprocess.Popen(
            command + ["--tiny"] * tiny,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(phase.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_group(process)
    status = LATE if code is None else KILLED if code < 0 else FAILED if code else OK
    told = said.read_text(errors="replace").splitlines()[-LINES:] if status != OK else []
    return Found(status, time.perf_counter() - began, code, written_figures(figures), told)


def written_figures(file: Path) -> dict[str, float | str]:
    """Return the figures of a phase; the one that a killed phase was writing is left out."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return dict(json.loads(line) for line in lines if line.endswith("\n"))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End what the phase has left: its data processes, too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(cache: str) -> dict[str, str]:
    """Let a phase find the packages and see one GPU, without a network and without the caches of the user."""
    paths = [*(str(folder) for folder in [unpacked_wheels(WHEELS)] if folder), str(ROOT / "benchmarks"), str(ROOT)]
    if given := os.environ.get("PYTHONPATH"):
        paths.append(given)
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": cache, "PYTHONUNBUFFERED": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
    return os.environ | fixed | offline | visible


def unpacked_wheels(folder: Path) -> Path | None:
    """Unpack the wheels of ``folder``, once; None: there are none."""
    wheels, target = sorted(folder.glob("*.whl")), folder / "unpacked"
    if not wheels:
        return None
    if not target.exists():
        new = folder / "unpacked.new"
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as content:
                content.extractall(new)
        new.replace(target)
    return target


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def table(day: Day) -> str:
    """Return all figures, phase by phase, and how each phase ended."""
    lines: list[str] = []
    for name, found in day.phases.items():
        lines += ["", name, *(f"  {key:<58} {_shown(value)}" for key, value in found.figures.items())]
        lines += [f"  | {line}" for line in found.said]
    lines += ["", f"{'phase':<10} {'status':<8} {'seconds':>7} {'figures':>8}"]
    for name, found in day.phases.items():
        lines.append(f"{name:<10} {found.status:<8} {found.seconds:>7.1f} {len(found.figures):>8}")
    return "\n".join(lines)


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def chosen(only: str | None, tiny: bool, known: Sequence[Phase] = PHASES) -> list[Phase]:
    """Return the phases that ``--only`` names, in their order; None: all."""
    names = [phase.name for phase in known]
    wanted = names if only is None else only.split(",")
    if unknown := [name for name in wanted if name not in names]:
        sys.exit(f"--only: found {', '.join(unknown)}; expected some of {','.join(names)}")
    return [Phase(one.module, TINY_LIMIT if tiny else one.limit) for one in known if one.name in wanted]


def main(report: Callable[[str], None] = print) -> None:
    """Run the phases that were asked for; exit code 1 if one of them did not end well."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", help=f"some of {','.join(phase.name for phase in PHASES)}; default: all")
    tiny = "tiny sizes, which run on a CPU, too; two phases at a time"
    options.add_argument("--tiny", action="store_true", help=tiny)
    options.add_argument("--output", type=Path, default=Path("gpu_day"), help="folder of the result and the traces")
    given = options.parse_args()
    day = run_day(chosen(given.only, given.tiny), given.output.resolve(), tiny=given.tiny, at_once=1 + given.tiny)
    report(table(day))
    report(f"wrote {given.output / RESULT}; send this folder")
    sys.exit(any(found.status != OK for found in day.phases.values()))


if __name__ == "__main__":
    main()
