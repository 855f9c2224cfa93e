"""Make the pictures of docs/report.md: `python tests/report/screenshots.py`, from the top of a checkout."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.report.browser import Theme, opened  # noqa: E402

SETTINGS = (
    "train.steps=40 train.log_every=2 train.micro_batches=4 train.trace.steps=[30] evaluation.loss_every=10 "
    "evaluation.examples_per_source=2 parallel.components.foundation.pp=2"
)


def main() -> None:
    """Train on two ranks, and take a picture of the top of the report in light and dark."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "quickstart"
        words = ["run", "quickstart", "--nproc", "2", *SETTINGS.split(), f"output_dir={run}"]
        subprocess.run([sys.executable, "-m", "omnitrain", *words], cwd=ROOT, check=True)
        for theme in get_args(Theme):
            with opened(run / "report.html", theme) as found:
                found.page.screenshot(path=ROOT / "docs" / f"report-{theme}.png")


if __name__ == "__main__":
    main()
