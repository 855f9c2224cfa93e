import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.recipe import Recipe
from omnitrain.recipe.yaml_text import parse_yaml, with_node
from omnitrain.train.metrics.flops import of_data_sheet
from omnitrain.train.planning.devices import DEVICES

RECIPE = """\
# mine
output_dir: runs/planned
model:
  foundation:
    config: {model_type: qwen3, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 3, num_attention_heads: 4,
             num_key_value_heads: 1, head_dim: 16, vocab_size: 512, tie_word_embeddings: true}
data: {train: [{path: none.jsonl}], pack_tokens: 256}
parallel:  # chosen by hand
  default: {compile: true}
# how long
train: {steps: 10, packs_per_step: 4, compile: {enabled: false}}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.yaml"
    file.write_text(RECIPE.replace("compile: true", "place: local"))
    return file


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", "mine.yaml", *arguments])


def test_a_plan_shows_the_best_layouts_and_writes_the_best_into_the_recipe(recipe: Path) -> None:
    found = call("--gpus", "2", "--memory", "1GiB", "--top", "2", "--json", "plan.json", "--apply")
    assert found.exit_code == 0, found.output
    numbers = json.loads(Path("plan.json").read_text())
    first, second = numbers["layouts"]
    assert first["seconds"] <= second["seconds"] and 0 < first["mfu"] < 1
    assert first["tokens_per_second"] == pytest.approx(4 * 256 / first["seconds"] / 2)
    assert sum(first["memory"].values()) == pytest.approx(first["peak"], rel=0.2)  # causes add up; the peak is counted
    assert "not tp2: tp: found 2, which does not divide the 1 key-value heads" in found.output
    text = recipe.read_text()
    assert text.startswith("# mine\n") and "\n# how long\ntrain:" in text and "place: local" in text
    assert parse_yaml(text, "")["parallel"] == first["parallel"]
    assert Recipe.load(recipe).parallel.of("foundation").memory.mode in first["layout"] + "none"


@pytest.mark.slow
def test_a_plan_says_how_many_devices_a_model_needs_that_does_not_fit(recipe: Path) -> None:
    refused = call("--gpus", "1", "--memory", "3MiB")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("omnitrain: no layout fits 1 x h100; the smallest, ")
    assert "would do (with train.packs_per_step" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device h10", "--device h10: unknown; did you mean `h100`?"),
        ("--device cpu", "--device cpu: unknown; choose from a100, b200, h100, h200, measured"),
        ("--gpus 12", "--gpus 12: found nodes of 8 devices; expected a multiple of 8, or set --gpus-per-node"),
        ("--gpus 4 --gpus-per-node 3", "--gpus 4: found nodes of 3 devices; expected a multiple of 3"),
        ("--memory 80gigs", "--memory 80gigs: expected a number above 0 with GiB, MiB or GB, such as 80GiB"),
        ("--memory 0GiB", "--memory 0GiB: expected a number above 0"),
        ("--gpus 64 train.packs_per_step=3", "no layout of 64 devices is possible: 3 packs of a step on 16 "),
        ("--gpus 2 parallel.default.tp=4", "no layout of 2 devices is possible: "),
        ("train.step=3", "train.step: unknown key"),
        ("model.foundation.config.model_type=qwen33", "found 'qwen33'; expected a model type"),
    ],
)
def test_a_request_that_makes_no_sense_is_answered_in_words(recipe: Path, arguments: str, message: str) -> None:
    refused = call(*arguments.split())
    assert refused.exit_code == 2 and message in refused.stderr, refused.output


def test_a_shipped_recipe_is_not_written() -> None:
    refused = CliRunner().invoke(app, ["plan", "quickstart", "--apply"])
    assert refused.exit_code == 2
    assert "copy it with `omnitrain cp quickstart FILE`" in refused.stderr


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\n",
        "a: 1",
        "parallel: auto\na: 1\n",
        "a: 1\nparallel:\n  b: 2\n\n# c\nd: 3\n",
        "parallel: {b: [1,\n 2]}\na: 1\n",
    ],
)
def test_a_node_of_a_recipe_is_written_and_all_else_stays(text: str) -> None:
    found = with_node(text, "parallel", {"x": 1})
    assert yaml.safe_load(found) == yaml.safe_load(text) | {"parallel": {"x": 1}}
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in found.splitlines() if line.startswith("#")
    ]


@pytest.mark.parametrize("name", ["A100", "H100", "H200", "B200"])
def test_a_plan_and_a_run_divide_by_the_same_peak(name: str) -> None:
    peak = of_data_sheet(name)
    assert peak is not None and DEVICES[name.lower()].flops == peak.flops


def test_the_page_has_the_figures_of_the_devices() -> None:
    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
    for name, device in DEVICES.items():
        rates = (device.bandwidth, device.link, device.network)
        cells = [f"`{name}`", f"{device.flops / 1e12:,.0f} TFLOP/s", f"{device.memory / 2**30:.1f} GiB"]
        row = " | ".join([*cells, *(f"{rate / 1e9:,.0f} GB/s" for rate in rates)])
        assert f"| {row} |" in page
