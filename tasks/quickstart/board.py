"""The board of a quickstart: the minutes until the model is above the floor in every task.

    python tasks/quickstart/board.py runs/board docs/board.json

adds one row for a run with evaluations during training (`make board` makes one): its date, the commit and the
processor, and the first evaluation in which no task is below ``FLOOR``. The time of earlier evaluations is in it.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FLOOR = 0.9
TASKS = ("image_to_text", "speech_to_text", "video_to_text", "images_to_text")
TASKS += ("text_to_image", "speech_to_image", "text_to_speech", "image_to_speech")


def main(run: Path, board: Path) -> None:
    """Add the row of ``run`` to the file ``board``, and print it. SystemExit: a task never reached the floor."""
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    commit = subprocess.run(["git", "-C", HERE, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    row = {"date": date.today().isoformat(), "commit": commit.stdout.strip(), "processor": processor()}
    row |= reached(evaluations)
    rows = json.loads(board.read_text()) if board.exists() else []
    board.write_text(json.dumps([*rows, row], indent=1) + "\n")
    print(row)


def reached(evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """The step and the minutes of the first evaluation in which every task is at the floor or above."""
    for scores in evaluations:
        if all(scores[task] >= FLOOR for task in TASKS):
            return {"steps": scores["step"], "minutes": round(scores["seconds"] / 60, 1)}
    below = {task: evaluations[-1][task] for task in TASKS if evaluations[-1][task] < FLOOR}
    raise SystemExit(f"below {FLOOR:.0%} at the end: {', '.join(f'{t} {s:.1%}' for t, s in below.items())}")


def processor() -> str:
    """The name of the processor, as Linux tells it, and the number of its cores here."""
    info = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.+)", info)
    return f"{name[1].strip() if name else platform.machine()}, {info.count('processor')} cores"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
