"""What ``make any-to-any`` does, with 20 steps of each run."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_each_run_of_any_to_any_is_judged_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--rounds=1", "--steps=20", "--prompts=4", f"--folder={tmp_path / 'runs'}"]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for file in ("first.json", "again.json"):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["any_to_any", *arguments, f"--json={tmp_path / file}"])
        module = runpy.run_path(str(BENCHMARKS / "any_to_any.py"), run_name="__main__")
        monkeypatch.setattr("omnitrain.train.trainer.Trainer.fit", None)  # the second call trains nothing
    first, again = (json.loads((tmp_path / file).read_text()) for file in ("first.json", "again.json"))
    assert first == again and first["name"] == "any_to_any" and first["formula"] in capsys.readouterr().out
    keys = {f"{name} {key}" for name in module["RUNS"] for key in ("guided", "unguided", "seconds")}
    assert set(first["figures"]) == set(first["rounds"]) == keys
    assert all(math.isfinite(value) for value in first["figures"].values())
    assert all(0 <= first["figures"][key] <= 1 for key in keys if "guided" in key)
