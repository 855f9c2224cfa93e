from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.errors import EXIT_USER_ERROR
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Recipe
from omnitrain.train.profile import profile_recipe
from tests.tiny import tiny_recipe


@pytest.mark.second
def test_the_profile_of_the_quickstart_has_its_table_its_files_and_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["data.pack_tokens=256", "data.workers=0", f"output_dir={tmp_path / 'run'}", "train.trace.steps=[1]"]
    costs = profile_recipe(Recipe.load("quickstart", overrides), tmp_path / "profile", steps=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile"]
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["costs.json", "trace-rank-0.json.gz"]
    names = set(costs.rows)
    assert names >= {
        "matrix products of layers",
        "attention",
        "loss head",
        "optimizer",
        "media of image_encoder",
        "media of audio_encoder",
        "wait for data",
    }
    # Each operation counts once, so all of them take at most the time of the step.
    total = sum(sum(row.values()) for row in costs.rows.values())
    assert 0.5 < total / costs.seconds <= 1 + 1e-9  # rounding of the sum
    both = costs.rows["matrix products of layers"]
    assert both.keys() == {"forward", "backward"}
    written = json.loads((tmp_path / "profile" / "costs.json").read_text())
    flops, line = written["metrics"]["flops"], written["metrics"]
    assert line["mfu"] == pytest.approx(flops["per_step"] / (line["seconds"] * flops["peak"]))
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "trace-rank-0.json.gz").read_bytes()))
    assert any(event.get("name") == "omnitrain: attention" for event in trace["traceEvents"])
    said = capsys.readouterr().out
    assert "What a step costs" in said and "everything else" in said and f"MFU {line['mfu']:.1%}" in said


@pytest.mark.second
def test_ranks_write_a_trace_each_and_what_is_computed_again_is_told(ranks: RankPool, tmp_path: Path) -> None:
    overrides = ["train.packs_per_step=2", "parallel.default.memory.recompute=full"]
    recipe = Recipe.load(str(tiny_recipe(tmp_path, text_only=True)), overrides)
    both = ranks.run(profile_recipe, recipe, tmp_path / "profile", 1, timeout_s=120, world=2)
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {
        "costs.json",
        "trace-rank-0.json.gz",
        "trace-rank-1.json.gz",
    }
    for costs in both:
        by_name = costs.rows
        assert by_name["matrix products of layers"]["again"] > 0
        assert "all-gather of FSDP" in by_name and "reduce-scatter of FSDP" in by_name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.stepz=3"], "did you mean `steps`"),
        (["data.pack_tokens=8"], "data.pack_tokens"),
        (["parallel.default.ulysses=2", "--nproc=3"], "needs a multiple of 2 ranks, found 3"),
    ],
)
def test_a_recipe_that_cannot_run_is_told_in_words(tmp_path: Path, words: list[str], message: str) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True)
    result = CliRunner().invoke(app, ["profile", str(recipe), *words, f"--output={tmp_path / 'profile'}"])
    assert result.exit_code == EXIT_USER_ERROR and message in result.output
    assert not (tmp_path / "profile").exists()
