"""``ot.notebook.launch``: results, output and errors of each rank, from a script and from a notebook."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import omnitrain as ot
from omnitrain.errors import UserError

ROOT = Path(__file__).parents[3]


def add_up(value: float) -> tuple[str, float]:
    total = torch.tensor(value + dist.get_rank())
    print(f"{value} and\n{dist.get_rank()}", end="")
    print("warned", file=sys.stderr)
    dist.all_reduce(total)
    return os.environ["RANK"], total.item()


def fail_on_1() -> None:
    print("starts")
    if dist.get_rank() == 1:
        raise ValueError("no image in row 7")
    threading.Event().wait()


def test_each_rank_brings_back_its_result_and_its_output_with_the_rank_before_each_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = ot.notebook.launch(add_up, 2, 0.5)
    assert list(found) == [("0", 2.0), ("1", 2.0)] and found[1] == found.results[1] and len(found) == 2
    assert found.output == ("0.5 and\n0warned\n", "0.5 and\n1warned\n")
    shown = capsys.readouterr().out
    assert sorted(shown.splitlines()) == sorted(f"[rank {r}] {t}" for r in range(2) for t in ("0.5 and", f"{r}warned"))
    assert repr(found) == "rank 0: ('0', 2.0)\nrank 1: ('1', 2.0)"


def test_an_error_on_one_rank_shows_its_traceback_and_ends_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with pytest.raises(ot.notebook.RankError) as failed:
        ot.notebook.launch(fail_on_1, 2, quiet=True)
    assert time.monotonic() - began < 60  # rank 0 would wait for ever
    error, message = failed.value, str(failed.value)
    assert (error.ranks, list(error.tracebacks)) == ([1, 0], [1])
    assert "rank 1 raised ValueError: no image in row 7" in message and "rank 0 was still running" in message
    assert 'raise ValueError("no image in row 7")' in error.tracebacks[1] and error.tracebacks[1] in message
    assert error.output == ("starts\n", "starts\n") and capsys.readouterr().out == ""
    assert isinstance(error.__cause__, ValueError)


def test_a_number_of_ranks_below_one_is_refused() -> None:
    with pytest.raises(UserError, match="nproc: found 0"):
        ot.notebook.launch(add_up, 0)


CELLS = """
import threading
import torch.distributed as dist
import omnitrain as ot

scale, lock = 3, threading.Lock()  # the lock cannot be pickled; an attribute below has its name
#---
def triple(value):
    print("on", dist.get_rank(), ot.__version__)
    return scale * value + dist.get_rank()
#---
print(ot.notebook.launch(triple, 2, 5).results)
#---
class Holder:
    def __init__(self):
        self.lock = scale

def add_one(value):  # two functions that call each other, and a class
    return twice(value - 1) + Holder().lock if value % 2 else value + 1

def twice(value):
    return 2 * add_one(value)

print(ot.notebook.launch(add_one, 2, 5).results)
#---
def broken(names):
    return names[dist.get_rank()]  # one name is missing

ot.notebook.launch(broken, 2, ["a"])
"""


@pytest.mark.slow
def test_notebook_cells_run_on_ranks_and_an_error_shows_the_line_of_its_cell() -> None:
    book: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS.split("#---\n")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with contextlib.suppress(CellExecutionError):
            NotebookClient(book, timeout=240, kernel_name="python3").execute()
    lines = "".join(output["text"] for output in book.cells[2].outputs).splitlines()
    assert (
        sorted(lines[:2]) == [f"[rank {rank}] on {rank} {ot.__version__}" for rank in range(2)]
        and lines[2] == "(15, 16)"
    )
    assert book.cells[3].outputs[0]["text"] == "(13, 13)\n"
    (error,) = [output for output in book.cells[4].outputs if output["output_type"] == "error"]
    assert error["ename"] == "RankError" and "rank 1 raised IndexError" in error["evalue"]
    assert "return names[dist.get_rank()]  # one name is missing" in error["evalue"]
