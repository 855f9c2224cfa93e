"""What a run shows on terminals of several widths, without a terminal, and in a notebook, kept in ``screens/``.

``python -m tests.train.metrics.test_screens`` writes the files anew.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
import pytest
from nbclient import NotebookClient
from rich.console import Console

from omnitrain.models.omni.summary import ComponentRow
from omnitrain.train.metrics import display, progress
from tests.train.metrics.training_shown import Clock, show_training

SCREENS = Path(__file__).parent / "screens"
ROOT = Path(__file__).parents[3]
WIDTHS = (50, 80, 100, 120, 160)
ROWS = [
    ComponentRow("foundation", "Qwen3ForCausalLM", 24_000, 24_000, "float32", "attention: sdpa, rms_norm: fused (9)"),
    ComponentRow("image_encoder", "VisionEncoder (SiglipVisionModel)", 7_008, 0, "bfloat16", "attention: sdpa"),
]
CELL = """
from omnitrain.train.metrics import progress
from omnitrain.train.metrics.console import console
from tests.train.metrics.training_shown import Clock, show_training
progress.time = Clock()
show_training(console, progress.time)
"""


def printed(width: int, *, is_terminal: bool) -> str:
    """All that a run prints, as a terminal gets it."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=width, color_system=None, highlight=False)
    with patch.object(display, "console", console), patch.object(progress, "time", Clock()):
        display.show_components(ROWS)
        show_training(console, progress.time)
        display.show_scores({"image_to_text": 0.995, "seconds": 263.7}, title="1600 held-out answers")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def on_screen(sent: str) -> str:
    """The lines that a terminal shows in the end of what was sent to it."""
    lines, row, column = [""], 0, 0
    for control, moved, text in re.findall(r"(\x1b\[(\d*)[A-Z]|\x1b\[\?25[lh]|[\r\n])|([^\x1b\r\n]+)", sent):
        if control == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif control == "\r":
            column = 0
        elif control.endswith("A"):
            row -= int(moved or 1)
        elif control.endswith("K"):
            lines[row] = ""
        elif text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
    return "".join(f"{line.rstrip()}\n" for line in lines).rstrip("\n") + "\n"


def notebook() -> str:
    """The outputs of an executed notebook, as text."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    with patch.dict(os.environ, {"PYTHONPATH": str(ROOT)}):
        NotebookClient(book, timeout=120, kernel_name="python3").execute()
    outputs: list[Any] = book.cells[0].outputs
    shown = [output["data"] if "data" in output else {"text/plain": output["text"]} for output in outputs]
    return "".join(f"{kind}:\n{data[kind].rstrip()}\n\n" for data in shown for kind in sorted(data, reverse=True))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_terminal_shows_step_bar_and_time_left_at_any_width(width: int) -> None:
    shown = on_screen(printed(width, is_terminal=True))
    assert shown == (SCREENS / f"{width}.txt").read_text()
    assert max(map(len, shown.splitlines())) <= width or width < 80
    assert "step 1200/2000" in shown and "ETA 0:00:56" in shown
    assert ("━━━━" in shown.split("step 1200/2000")[1].split("ETA")[0]) == (width >= 80)


def test_a_file_gets_a_line_for_each_line_of_metrics_and_one_in_thirty_seconds() -> None:
    shown = printed(120, is_terminal=False)
    assert shown == (SCREENS / "lines.txt").read_text()
    assert re.findall(r"^step (\d+)", shown, re.MULTILINE) == ["600", "1029", "1200"]


@pytest.mark.second
def test_a_notebook_shows_one_bar_that_moves() -> None:
    shown = notebook()
    assert shown == (SCREENS / "notebook.txt").read_text()
    assert shown.count('<progress value="1200" max="2000"') == 1 == shown.count("step 1200/2000 ━")


if __name__ == "__main__":
    for width in WIDTHS:
        (SCREENS / f"{width}.txt").write_text(on_screen(printed(width, is_terminal=True)))
    (SCREENS / "lines.txt").write_text(printed(120, is_terminal=False))
    (SCREENS / "notebook.txt").write_text(notebook())
