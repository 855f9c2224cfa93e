"""Make the pictures of docs/report.md and docs/data-preview.md: `python tests/report/screenshots.py`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import FloatRect  # noqa: E402

from tests.report.browser import Theme, opened  # noqa: E402

SETTINGS = (
    "train.steps=40 train.log_every=2 train.packs_per_step=4 train.trace.steps=[30] evaluation.loss_every=10 "
    "evaluation.examples_per_source=2 parallel.components.foundation.pp=2"
)


def main() -> None:
    """Train on two ranks, and take a picture of the top of the report in light and dark; and one of a preview."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "quickstart"
        words = ["run", "quickstart", "--nproc", "2", *SETTINGS.split(), f"output_dir={run}"]
        subprocess.run([sys.executable, "-m", "omnitrain", *words], cwd=ROOT, check=True)
        for theme in get_args(Theme):
            with opened(run / "report.html", theme) as found:
                found.page.screenshot(path=ROOT / "docs" / f"report-{theme}.png")
        picture_of_preview(Path(folder) / "preview.html")


def picture_of_preview(page: Path) -> None:
    """Take a picture of three samples of the quickstart."""
    words = ["show", "quickstart", "--packs", "--num-packs", "1", "--output", str(page)]
    subprocess.run([sys.executable, "-m", "omnitrain", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    with opened(page, "light", width=900) as found:
        shown = found.page.query_selector_all("#pack1 .sample")[11:14]
        boxes = [box for sample in shown if (box := sample.bounding_box()) is not None]
        top, bottom = boxes[0]["y"] - 8, boxes[-1]["y"] + boxes[-1]["height"] + 8
        clip = FloatRect(x=0, y=top, width=900, height=bottom - top)
        found.page.screenshot(path=ROOT / "docs" / "data-preview.png", clip=clip, full_page=True)


if __name__ == "__main__":
    main()
