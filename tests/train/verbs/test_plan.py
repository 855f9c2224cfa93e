import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.errors import RecipeError, UserError
from omnitrain.parallel.state import init_state_of
from omnitrain.recipe import ComponentPlan, ParallelPlan, Recipe
from omnitrain.recipe.yaml_text import parse_yaml, with_node
from omnitrain.train.launch import launch
from omnitrain.train.metrics.flops import of_data_sheet
from omnitrain.train.planning import search
from omnitrain.train.planning.devices import DEVICES
from omnitrain.train.planning.estimate import Estimate
from omnitrain.train.planning.search import Candidate
from omnitrain.train.verbs import plan as plan_verb
from omnitrain.train.verbs.plan import Planned
from tests.tiny import tiny_recipe
from tests.train.planning import planned

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


@pytest.mark.parametrize("is_counted", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["given", "counted"])
def test_a_plan_shows_the_best_layouts_and_writes_the_best_into_the_recipe(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, is_counted: bool
) -> None:
    if not is_counted:
        monkeypatch.setattr(search, "count_cell", planned.counted)
        monkeypatch.setattr(search, "predict_rank", lambda *_, **__: SimpleNamespace(peak=3e8))
    found = call("--gpus", "2", "--memory", "1GiB", "--top", "2", "--json", "plan.json", "--apply")
    assert found.exit_code == 0, found.output
    numbers = json.loads(Path("plan.json").read_text())
    first, second = numbers["layouts"]
    assert first["seconds"] <= second["seconds"] and 0 < first["mfu"] < 1
    assert first["tokens_per_second"] == pytest.approx(4 * 256 / first["seconds"] / 2)
    if is_counted:  # causes add up
        assert sum(first["memory"].values()) == pytest.approx(first["peak"], rel=0.2)
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
        pytest.param(
            "--gpus 64 train.packs_per_step=3",
            "no layout of 64 devices is possible: train.packs_per_step: found 3; expected a multiple of ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--gpus 2 parallel.default.dp_shard=4", "no layout of 2 devices is possible: ", marks=pytest.mark.slow
        ),
        ("train.step=3", "train.step: unknown key"),
        ("--json no/plan.json", "--json no/plan.json: no is not a writable folder"),
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
        "parallel: {\n  b: 1,\n}\n# c\na: 1\n",
    ],
)
def test_a_node_of_a_recipe_is_written_and_all_else_stays(text: str) -> None:
    found = with_node(text, "parallel", {"x": 1})
    assert yaml.safe_load(found) == yaml.safe_load(text) | {"parallel": {"x": 1}}
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in found.splitlines() if line.startswith("#")
    ]


def test_a_recipe_of_windows_keeps_the_ends_of_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"# mine\r\nparallel: auto\r\na: 1\r\n")
    plan_verb.apply_plan(str(file), ParallelPlan(default=ComponentPlan(tp=2)))
    assert file.read_bytes() == b"# mine\r\nparallel:\r\n  default:\r\n    tp: 2\r\na: 1\r\n"


@pytest.mark.parametrize(
    "text", ["{a: 1, parallel: {b: 1}}\n", "a: 1\n...\n", '{"a": 1}', "parallel: &x {b: 1}\na: *x\n"]
)
def test_a_file_in_which_a_node_has_no_lines_of_its_own_is_not_written(recipe: Path, text: str) -> None:
    with pytest.raises(RecipeError, match="cannot replace `parallel` in this file"):
        with_node(text, "parallel", {"x": 1})


def test_a_recipe_in_one_line_is_refused_before_the_search_and_stays(recipe: Path) -> None:
    as_json = json.dumps(parse_yaml(recipe.read_text(), ""))
    recipe.write_text(as_json)
    refused = call("--apply")
    assert refused.exit_code == 2 and "--apply: mine.yaml: cannot replace `parallel`" in refused.stderr
    assert recipe.read_text() == as_json


def check(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["check", "mine.yaml", "--no-tokenizer", *arguments])


def test_a_check_for_a_device_speaks_of_its_own_options(recipe: Path) -> None:
    unknown = check("--device", "h10")
    assert unknown.exit_code == 2 and unknown.stderr.startswith("omnitrain: --device h10: unknown")
    nodes = check("--device", "h100", "--nproc", "12")
    assert nodes.exit_code == 2
    assert nodes.stderr == "omnitrain: --nproc 12: found nodes of 8 devices; expected a multiple of 8\n"
    packs = check("--device", "h100", "--nproc", "8")
    assert packs.exit_code == 2
    words = "train.packs_per_step: found 4; expected a multiple of the 8 data-parallel ranks"
    assert packs.stderr == f"omnitrain: {words}\n"


@pytest.mark.second
def test_a_step_that_counts_samples_has_as_many_packs_of_one_text(recipe: Path) -> None:
    counted = check("--device", "h100", "--nproc", "8", "train.packs_per_step=1", "train.samples_per_step=12")
    assert counted.exit_code == 2
    assert "train.packs_per_step: found 12; expected a multiple of the 8 data-parallel ranks" in counted.stderr


@pytest.mark.slow
def test_a_check_without_a_number_of_ranks_plans_for_one_that_fits(recipe: Path) -> None:
    found = check("--device", "h100", "parallel.default.dp_shard=2")
    assert "\n2 x h100, dp2: a step takes " in found.output, found.output


def test_tables_of_layouts_are_whole_at_120_columns() -> None:
    words = "tp8 cp2 ulysses8 pp16 ep128 recompute-selective +section64"
    plan = Candidate({word: word for word in words.split()}, ParallelPlan())
    causes = ("bubble", "exchanges", "weights", "encoders", "sections")
    sizes = dict.fromkeys(("weights", "gradients", "optimizer", "activations", "features", "buffers"), 12.34 * 2**30)
    estimated = replace(plan, found=Estimate(1234.5, dict.fromkeys(causes, 0.1234), sizes, 10**9))
    console = Console(width=120, record=True, file=StringIO())
    console.print(Planned(64, DEVICES["h100"], (estimated,), {}, 1e18, "packs"), soft_wrap=True)
    text = console.export_text()
    assert "…" not in text and max(map(len, text.splitlines())) <= 120
    assert all(cause in text for cause in (*causes, *sizes, "1.23e+03 s", "12.3%"))


def test_auto_is_short_for_a_plan_that_no_rank_starts_with(recipe: Path) -> None:
    plan = Recipe.load("mine.yaml", ["parallel=auto"]).parallel
    assert plan == ParallelPlan(auto=True)
    with pytest.raises(UserError, match=r"parallel\.auto: a layout is chosen before ranks start"):
        init_state_of(plan)


@pytest.mark.parametrize("verb", ["run", "profile"])
def test_ranks_start_with_the_layout_that_was_chosen(recipe: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    chosen = ParallelPlan(components={"foundation": ComponentPlan(tp=2)})
    best = replace(Candidate({"tp": 2}, chosen), found=Estimate(0.5), counted=2**30)
    commands: list[list[str]] = []

    def launched(arguments: list[str] | Callable[[], list[str]], nproc: int, **_: object) -> int:
        commands.append(arguments if isinstance(arguments, list) else arguments())
        return 0

    monkeypatch.setattr(plan_verb, "plan_recipe", lambda *_, **__: Planned(2, DEVICES["h100"], (best,), {}, 1, ""))
    monkeypatch.setattr(launch, "launch_with_restarts" if verb == "run" else "launch", launched)
    found = CliRunner().invoke(app, [verb, "mine.yaml", "parallel=auto", "--nproc", "2"])
    assert found.exit_code == 0, found.output
    assert "parallel.auto: the layout is tp2, about 0.5 s a step and 1 GiB" in found.output
    overrides = [word for word in commands[0][commands[0].index("mine.yaml") + 1 :] if not word.startswith("--")]
    assert Recipe.load("mine.yaml", overrides).parallel == chosen


@pytest.mark.slow
def test_a_run_chooses_a_layout_and_keeps_it_when_it_continues(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, text_only=True, packs_per_step=4)

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "omnitrain", "run", str(recipe), "parallel=auto", "--nproc", "2", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout

    assert "parallel.auto: the layout is " in run("train.steps=2")
    plan = Recipe.load(tmp_path / "run" / "recipe.yaml").parallel
    assert plan not in (ParallelPlan(), ParallelPlan(auto=True))
    assert f"the layout is as {tmp_path / 'run'} has it" in run("train.steps=3", "--resume")
    assert Recipe.load(tmp_path / "run" / "recipe.yaml").parallel == plan


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
