"""The board of a quickstart has the minutes until no task is below its floor."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tasks" / "quickstart"))
import board  # noqa: E402


def written(folder: Path, *scores: float) -> None:
    rows = [dict.fromkeys(board.TASKS, 1.0) | {"step": 500 * n, "seconds": 90.0 * n} for n in range(1, len(scores) + 1)]
    lines = [json.dumps(row | {"text_to_image": score}) for row, score in zip(rows, scores, strict=True)]
    (folder / "evaluations.jsonl").write_text("\n".join(lines) + "\n")


def test_a_row_has_the_first_evaluation_in_which_all_tasks_are_at_the_floor(tmp_path: Path) -> None:
    for scores, row in (((0.5, 0.9, 0.8), (1000, 3.0)), ((0.95,), (500, 1.5))):
        written(tmp_path, *scores)
        board.main(tmp_path, tmp_path / "board.json")
        added = json.loads((tmp_path / "board.json").read_text())[-1]
        assert (added["steps"], added["minutes"]) == row and len(added["commit"]) == 8
    assert len(json.loads((tmp_path / "board.json").read_text())) == 2


def test_a_run_that_never_reached_the_floor_gives_no_row_and_names_the_task(tmp_path: Path) -> None:
    written(tmp_path, 0.5, 0.875)
    with pytest.raises(SystemExit, match=r"below 90% at the end: text_to_image 87.5%"):
        board.main(tmp_path, tmp_path / "board.json")
    assert not (tmp_path / "board.json").exists()


def test_the_page_shows_the_rows_of_the_board() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for row in json.loads((ROOT / "docs" / "board.json").read_text()):
        cells = (row["date"], row["commit"], row["processor"], f"{row['steps']:,}", f"{row['minutes']:.1f}")
        assert f"| {' | '.join(cells)} |" in page
