"""The code blocks of README.md and docs/*.md run, or are read by what reads them in use.

The names of models on the Hub and of recipes stand for tiny ones. Blocks that need ranks, plugins or HF ``Trainer`` run
in tests of their own (:data:`ELSEWHERE`).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
import yaml
from pydantic import TypeAdapter
from torch.distributed.run import parse_args
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from typer.testing import CliRunner

import omnitrain as ot
from omnitrain.cli.main import app, names_a_model
from omnitrain.errors import UserError
from omnitrain.models.omni.build import build_foundation_model, build_omni_model
from omnitrain.parallel.state import forget_parallel_state, leave_process_groups
from tests.parallel.factories import any_to_any
from tests.test_docs import PAGES, ROOT, command_lines
from tests.tiny import FOUNDATION, SIGLIP, TASKS, png, tiny_model, tiny_processor, tiny_recipe, tiny_row, tiny_tokenizer
from tests.train.test_native_foundation import save_llava

ELSEWHERE = {
    "parallel.md": {0: "tests/parallel/test_parallel_page.py", 1: "tests/parallel/test_parallel_page.py"},
    "python.md": {
        0: "tests/train/test_python_page.py",
        1: "tests/parallel/test_own_loop.py",
        2: "tests/train/test_python_page.py",
        3: "tests/models/omni/test_hf_batch.py",
    },
    "recipes.md": {2: "tests/train/test_plugins.py"},
}


def blocks(page: str, language: str) -> list[str]:
    (path,) = [one for one in PAGES if one.name == page]
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def run(page: str, number: int, names: dict[str, Any] | None = None, **replaced: str) -> dict[str, Any]:
    """Run a page's python block with other texts in place of those in ``replaced`` (``_`` stands for no letter)."""
    return _run(blocks(page, "python")[number], page, names or {}, replaced)


def _run(code: str, page: str, names: dict[str, Any], replaced: dict[str, str]) -> dict[str, Any]:
    for old, new in replaced.items():
        assert old in code, f"{page} does not say {old!r}"
        code = code.replace(old, new)
    names |= {"__name__": "__main__"}
    exec(compile(code, page, "exec"), names)
    return names


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name on the Hub -> folder of a tiny model."""
    folder = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    build_foundation_model(FOUNDATION).save_pretrained(folder / "qwen3")
    tiny_tokenizer().save_pretrained(folder / "qwen3")
    model = build_omni_model(foundation=FOUNDATION, encoders={"image_encoder": {"tower": {"config": SIGLIP}}})
    model.image_encoder.tower.save_pretrained(folder / "siglip")
    SiglipImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder / "siglip")
    save_llava(folder / "llava")
    names = {"Qwen/Qwen3-0.6B": "qwen3", "google/siglip-base-patch16-224": "siglip"}
    return {name: str(folder / tiny) for name, tiny in (names | {"Qwen/Qwen2.5-VL-3B-Instruct": "llava"}).items()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_the_recipe_of_the_quickstart_and_of_its_page_trains_and_gives_a_model(here: Path, hub: dict[str, str]) -> None:
    path = tiny_recipe(here)
    names = run(
        "quickstart.md",
        0,
        **{"recipes/quickstart.yaml": str(path), "train.steps=200": "train.steps=1"},
        **{name: folder for name, folder in hub.items() if "VL" not in name},
    )
    assert names["summary"].step == 1 and names["other"].device.type == "meta"
    loaded = dict(names["model"].named_parameters())
    assert loaded and all(parameter.isfinite().all() for parameter in loaded.values())
    path.rename(here / "my.yaml")
    assert run("recipes.md", 0, **{"train.steps=200": "train.steps=1"})["recipe"].train.seed == 1


def test_both_data_sets_of_the_quickstart_are_the_same_sample(here: Path) -> None:
    (here / "cat.jpg").write_bytes(png(0))
    (line,) = [block for block in blocks("quickstart.md", "json") if "messages" in block]
    (here / "mine.jsonl").write_text(line)
    run("quickstart.md", 1)
    processor = tiny_processor(tiny_model(decoders={}))
    one, two = (
        processor.sample(rows[0])
        for rows in ot.data.open_sources([ot.recipe.DataSource(path=path) for path in ("mine.jsonl", "mine.parquet")])
    )
    assert one.input_ids.tolist() == two.input_ids.tolist() and one.loss_mask.sum() == len("A cat.") + 1
    assert [span.component for span in one.spans] == ["image_encoder"] == [span.component for span in two.spans]


def test_a_whole_model_tells_how_it_was_tested(hub: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    name = "Qwen/Qwen2.5-VL-3B-Instruct"
    run("models.md", 0, **{name: hub[name]})
    assert "vision_tower" in capsys.readouterr().out


def test_a_plan_with_adapters_of_experts_is_a_plan() -> None:
    assert run("lora.md", 0)["plan"].default.lora.targets == ["experts.*"]


def test_attention_of_ones_own_over_ulysses_is_that_of_the_whole_in_one_process() -> None:
    attend = run("sequences.md", 0)["attend"]
    ot.init_parallel_state()
    try:
        query, key, value = torch.randn(3, 1, 5, 4, 2)
        found = attend(query, key, value, lambda q, k, v: q * k + v)
    finally:
        forget_parallel_state()
        torch.distributed.destroy_process_group()
    assert torch.equal(found, query * key + value)


def test_the_scorer_of_the_page_counts_right_answers() -> None:
    score = run("recipes.md", 1)["score"]
    answers = [
        SimpleNamespace(answer=SimpleNamespace(text=text), row=SimpleNamespace(extra={"label": "7"})) for text in "78"
    ]
    assert score(answers) == {"accuracy": 0.5}


def test_an_encoder_of_ones_own_is_put_together_and_saved(here: Path, hub: dict[str, str]) -> None:
    if "colors" not in sys.modules:  # another test may have registered its classes
        (here / "colors.py").write_text(blocks("recipes.md", "python")[2])
        sys.path.insert(0, str(here))
    name = "Qwen/Qwen3-0.6B"
    run("recipes.md", 3, **{name: hub[name], "<|image_pad|>": '<|image|>", end="<|end|>'})
    model, processor = ot.load_checkpoint("models/colors")
    assert model.encoder_names == ["image_encoder"] and set(processor.readers) == {"image"}


def test_the_hooks_of_the_page_are_called_from_python_and_from_a_recipe(here: Path) -> None:
    (here / "my_hooks.py").write_text(blocks("hooks.md", "python")[1])
    sys.path.insert(0, str(here))
    path = tiny_recipe(here, evaluated=True, text_only=True)
    summary = run(
        "hooks.md",
        0,
        **{"recipes/quickstart.yaml": str(path), "train.steps=200": "train.steps=1", "runs/hooks": "python"},
    )["summary"]
    assert summary.step == 1 and summary.stopped is None
    (line,) = map(json.loads, (here / "python" / "metrics.jsonl").read_text().splitlines())
    assert line["hours"] > 0 and 0 <= line["metrics"]["accuracy"]["text"] <= 1
    tree = yaml.safe_load(path.read_text())
    for key, value in yaml.safe_load(blocks("hooks.md", "yaml")[0]).items():
        tree[key] |= value
    tree["evaluation"]["loss_every"] = 1
    path.write_text(yaml.safe_dump(tree))
    assert CliRunner().invoke(app, ["run", str(path), "train.steps=2"]).exit_code == 0
    lines = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["heldout"]["metrics"]["accuracy"] and line["hours"] > 0 for line in lines)


@pytest.mark.slow
def test_the_factory_of_the_verify_page_is_verified(here: Path) -> None:
    (here / "my_models.py").write_text("from tests.parallel.factories import any_to_any as build\n")
    sys.path.insert(0, str(here))
    processor = tiny_processor(any_to_any())
    samples = [processor.sample(tiny_row(TASKS[i % len(TASKS)], i), i) for i in range(8)]
    report = run("verify.md", 0, {"samples": samples})["report"]
    assert [row.status for row in report.rows] == ["equal"] * 3


@pytest.mark.slow
def test_the_cell_of_the_verify_page_is_verified(hub: dict[str, str]) -> None:
    """A program without a file, as a notebook is."""
    name = "Qwen/Qwen3-0.6B"
    samples = 'from tests.parallel.verify.test_verify import hf_samples\n\nsamples = hf_samples("qwen3")\n'
    program = samples + blocks("verify.md", "python")[1].replace(name, hub[name])
    ended = subprocess.run([sys.executable, "-"], input=program, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.stdout.count("equal") == 2 and not ended.returncode, ended.stderr


def test_the_data_of_a_recipe_is_shown_and_measured(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_recipe(here, 7).rename(here / "my.yaml")
    names = run("data-preview.md", 0)
    assert len(names["shown"].packs) == 2 and (here / "preview.html").is_file()
    assert names["stats"].pack_tokens == 512 and "[('train', " in capsys.readouterr().out


RUN: dict[str, set[int]] = {
    "data-preview.md": {0},
    "hooks.md": {0, 1},
    "lora.md": {0},
    "models.md": {0},
    "quickstart.md": {0, 1},
    "recipes.md": {0, 1, 3},
    "sequences.md": {0},
    "verify.md": {0, 1},
}


def test_every_python_block_of_the_pages_is_run_by_a_test() -> None:
    for page in PAGES:
        covered = RUN.get(page.name, set()) | set(ELSEWHERE.get(page.name, {}))
        assert covered == set(range(len(blocks(page.name, "python")))), page.name
    for page, files in ELSEWHERE.items():
        for file in files.values():
            assert f'"{page}"' in (ROOT / file).read_text(), file


YAML = [(page.name, number, text) for page in PAGES for number, text in enumerate(blocks(page.name, "yaml"))]


@pytest.mark.parametrize(("page", "number", "text"), YAML, ids=lambda one: str(one) if len(str(one)) < 20 else "")
def test_every_yaml_block_is_part_of_a_recipe_or_a_row(here: Path, page: str, number: int, text: str) -> None:
    tree = yaml.safe_load(text.replace("colors.py", "plugin_of_a_page.py"))  # another test imports `colors`
    if "messages" in tree:
        row = tree | {name: [f"{name}.bin"] for name in ("images", "audios", "videos") if name in tree}
        (here / "rows.jsonl").write_text(json.dumps(row))
        (rows,) = ot.data.open_sources([ot.recipe.DataSource(path="rows.jsonl")])
        assert [message["role"] for message in rows[0].messages] == [message["role"] for message in tree["messages"]]
        assert not rows[0].problem and ("photos/cat.png" in text) == (rows[0].media["image"] == ["photos/cat.png"] * 4)
        return
    (here / "plugin_of_a_page.py").touch()
    required = {"data": {"train": [{"path": "rows.jsonl"}]}}
    for key, value in tree.items():
        given = required[key] | value if key in required else value
        TypeAdapter(get_type_hints(ot.Recipe, include_extras=True)[key]).validate_python(given)


def test_the_list_of_problems_is_what_check_says_of_these_mistakes(here: Path) -> None:
    text = (ROOT / "recipes" / "quickstart.yaml").read_text()
    for right, wrong in (
        ("hidden_size: 128", "hiden_size: 128"),
        ("kind: pixel_shuffle", "kind: pixelshuffle"),
        ("pack_tokens:", "pack_token:"),
        ("warmup_steps: 50", "warmup_steps: many"),
    ):
        assert right in text
        text = text.replace(right, wrong)
    (here / "mine.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        ot.Recipe.load("mine.yaml", ["train.stpes=20"])
    (shown,) = [block for block in blocks("recipes.md", "text") if "stpes" in block]
    assert [line.strip() for line in shown.splitlines()] == [
        line.strip() for line in f"omnitrain: {refused.value}".splitlines()
    ]


OWN_IMAGES = ("cp own_images", "check first.yaml", "run first.yaml", "generate runs/own_images")
# Command of a page -> where it runs instead of here: it starts ranks, or needs a model of the Hub.
COMMANDS_ELSEWHERE = {
    "run quickstart --nproc 2": ".ci/run",
    "run my.yaml --nproc 4": ".ci/run",
    "run quickstart output_dir=runs/mine train.packs_per_step=6 --nproc 4": "tests/train/test_killed_runs.py",
    "verify quickstart": "tests/train/verbs/test_verify.py",
    "show quickstart --schedule": "tests/train/verbs/test_schedule.py",
    "profile quickstart": "tests/train/test_profile.py",
    "generate runs/quickstart --prompts": "tests/train/verbs/test_answers.py",
    "generate runs/mine --prompt draw a 7 --guidance": "tests/train/test_guided_runs.py",
    "generate runs/mine --prompt draw a 7 --size": "tests/models/decoders/test_sizes.py",
    "generate runs/quickstart --chat": "tests/train/verbs/test_answers.py",
    "generate runs/text_to_film --prompt": "tests/models/decoders/test_films.py",
    "check finetune_vlm": "tests/test_recipes.py",
    "cp qwen3_vl my.yaml": "tests/cli/test_verbs.py",
    "check my.yaml --nproc 8": "tests/cli/test_verbs.py",
    "verify my.yaml": "tests/train/verbs/test_verify.py",
    "plan finetune_text --gpus": "tests/train/verbs/test_plan.py",
    **dict.fromkeys(OWN_IMAGES, "tests/test_page_blocks.py"),
}


def commands_here(page: str) -> list[list[str]]:
    """The words of the commands that run here; others must be named above."""
    (path,) = [one for one in PAGES if one.name == page]
    lines = [words[1:] for words in command_lines(path) if words[0] == "omnitrain"]
    return [words for words in lines if not " ".join(words).startswith(tuple(COMMANDS_ELSEWHERE))]


def test_every_command_of_the_pages_runs() -> None:
    assert [page.name for page in PAGES if commands_here(page.name)] == [
        "checkpoints.md",
        "data-preview.md",
        "models.md",
        "quickstart.md",
        "recipes.md",
        "report.md",
    ]
    lines = [" ".join(words[1:]) for page in PAGES for words in command_lines(page) if words[0] == "omnitrain"]
    for start, file in COMMANDS_ELSEWHERE.items():
        assert any(line.startswith(start) for line in lines) and (ROOT / file).is_file(), start


def test_a_model_of_the_hub_is_checked_without_its_weights(here: Path, hub: dict[str, str]) -> None:
    ((verb, name),) = commands_here("models.md")
    shutil.copytree(hub[name], here / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    done = CliRunner().invoke(app, [verb, "model/"])
    assert done.exit_code == 0 and "vision_tower" in done.stdout, done.output


@pytest.mark.parametrize(
    "page",
    [
        "data-preview.md",
        "report.md",
        *(pytest.param(page, marks=pytest.mark.second) for page in ("quickstart.md", "checkpoints.md", "recipes.md")),
    ],
)
def test_the_commands_of_a_page_run_one_after_the_other(here: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, on a tiny quickstart with its samples' names, two steps, and answers of two tokens."""
    monkeypatch.setattr("omnitrain.recipe.tree._PACKAGE", here)
    (here / "recipes").mkdir()
    is_quickstart = page == "quickstart.md"
    recipe = tiny_recipe(here / "recipes", 7, evaluated=is_quickstart, text_only=not is_quickstart, steps=2)
    quickstart = recipe.rename(here / "recipes" / "quickstart.yaml")
    quickstart.write_text(quickstart.read_text().replace(str(here / "recipes" / "run"), "runs/quickstart"))
    if is_quickstart:
        assert "make quickstart" in (ROOT / "docs" / page).read_text()
        assert CliRunner().invoke(app, ["run", "quickstart"]).exit_code == 0
        tiny_recipe(here / "recipes", 7, text_only=True, steps=2).rename(
            quickstart
        )  # the samples of one run are enough
    # The tiny rows have sound and videos in other formats.
    tiny = {
        "=200": "=2",
        "=3000": "=3",
        "=400": "=4",
        "save.every=100": "save.every=1",
        "prompt_0.flac": "prompt_0.wav",
    }
    tiny["video_to_text_1_prompt_0.png"] = "video_to_text_1_prompt_0.webp"
    for words in commands_here(page):
        limit = ["--max-new-tokens", "2"] if words[0] == "generate" else []
        for old, new in tiny.items():
            words = [word.replace(old, new) for word in words]
        done = CliRunner().invoke(app, [*words, *limit])
        leave_process_groups()
        assert done.exit_code == 0, (words, done.output, done.exception)
    if page == "data-preview.md":
        assert {file.name for file in here.iterdir()} >= {"preview.html", "stats.html", "stats.json"}
        return
    assert {file.name for file in (here / "runs" / "mine").iterdir()} >= {"recipe.yaml", "metrics.jsonl", "checkpoints"}


def test_the_commands_for_a_folder_of_images_and_a_json_file_give_a_model_that_answers(here: Path) -> None:
    (here / "train.json").write_text(*[block for block in blocks("quickstart.md", "json") if "conversations" in block])
    (here / "images").mkdir()
    (here / "images" / "0001.jpg").write_bytes(png(0))
    short = {"run": ["train.steps=2"], "generate": ["--max-new-tokens", "2"]}
    (page,) = [one for one in PAGES if one.name == "quickstart.md"]
    commands = [words[1:] for words in command_lines(page) if " ".join(words[1:]).startswith(OWN_IMAGES)]
    assert [words[0] for words in commands] == ["cp", "check", "run", "generate"]
    for words in commands:
        done = CliRunner().invoke(app, [*words, *short.get(words[0], [])])
        assert done.exit_code == 0, (words, done.output, done.exception)


TORCHRUN = [words for page in PAGES for words in command_lines(page) if words[0] == "torchrun"]


@pytest.mark.parametrize("words", TORCHRUN, ids=" ".join)
def test_torchrun_takes_the_command_and_starts_a_verb(words: list[str]) -> None:
    arguments = parse_args(words[1:])
    assert arguments.module and arguments.training_script == "omnitrain"
    assert arguments.training_script_args[0] == "run" and not names_a_model(arguments.training_script_args[1])


def test_flags_of_benchmarks_are_theirs() -> None:
    shared = (ROOT / "benchmarks" / "harness.py").read_text()
    for page in PAGES:
        for words in command_lines(page):
            if words[0] == "python" and words[1].startswith("benchmarks/"):
                source = (ROOT / words[1]).read_text() + shared
                assert [flag for flag in words[2:] if flag.startswith("--") and f'"{flag}"' not in source] == []
