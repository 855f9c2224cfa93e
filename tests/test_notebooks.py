"""The notebooks of docs/notebooks run, and have their outputs.

``python -m tests.test_notebooks [NAME ...]`` runs them and writes their outputs anew.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
NAMES = ["layout_study", "own_vlm", "quickstart"]
TIMEOUT = 600  # seconds of a cell


@contextmanager
def environment() -> Iterator[None]:
    """The kernel imports this checkout, has one thread, and says nothing of widgets that are not installed."""
    changes = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
    changes["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # they appear only where a file is read for the first time
    with patch.dict(os.environ, changes):
        yield


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def executed(name: str) -> Any:
    """The notebook, run in its folder; a cell that fails raises."""
    book = read(name)
    place = {"metadata": {"path": str(FOLDER)}}
    with environment():
        NotebookClient(book, timeout=TIMEOUT, kernel_name="python3", record_timing=False, resources=place).execute()
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return book


def joined(outputs: list[Any]) -> list[Any]:
    """Outputs in which consecutive texts of one stream are one."""
    kept: list[Any] = []
    for output in outputs:
        if kept and output.output_type == "stream" == kept[-1].output_type and output.name == kept[-1].name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def code_cells(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> set[str]:
    """What a cell shows: ``text/html``, ``image/png``, ..., and names of streams."""
    return {kind for output in cell.outputs for kind in (output.get("data") or {output.get("name"): None})}


def words(book: Any) -> str:
    """All that the outputs say as text, without codes for colours."""
    outputs = [output for cell in code_cells(book) for output in cell.outputs]
    text = "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_outputs_of_all_its_cells_in_their_order(name: str) -> None:
    book = read(name)
    nbformat.validate(book)
    cells = code_cells(book)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert len(text) < 600_000 and str(ROOT) not in text and "site-packages" not in text


def test_the_quickstart_has_ten_cells() -> None:
    assert len(code_cells(read("quickstart"))) == 10


def test_all_notebooks_are_run_here() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_what_it_showed(name: str) -> None:
    kept, new = read(name), executed(name)
    for before, now in zip(code_cells(kept), code_cells(new), strict=True):
        assert kinds(now) == kinds(before), now.source
    said = words(new)
    if name == "quickstart":
        assert "step 300/300" in said and "'image_to_text': " in said and "resumed from" in said
    elif name == "own_vlm":
        right, asked = map(int, re.findall(r"(\d+) of (\d+) held-out sums are right", said)[0])
        assert right / asked > 0.8
        assert "rank 1 raised IndexError" in said and 'print("hello from", names[' in said
        assert "unreadable image of ... bytes" in said and said.count(" equal ") == 2
    else:
        differences = [float(one) for one in re.findall(r"│ (\d\.\de[+-]\d+) +│$", said, re.MULTILINE)]
        assert len(differences) == 6 and max(differences) < 1e-5 and said.count(" equal ") == 2


if __name__ == "__main__":
    for one in sys.argv[1:] or NAMES:
        nbformat.write(executed(one), FOLDER / f"{one}.ipynb")
