import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.errors import DataError
from omnitrain.recipe import Recipe

RECIPE = """\
# A recipe with a summary
model: {foundation: some/model}
data: {train: [{path: train.parquet}]}
"""


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped recipes with `small.yaml`; the working folder is its parent."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "small.yaml").write_text(RECIPE)
    monkeypatch.setattr("omnitrain.recipe.tree._PACKAGE", tmp_path)
    monkeypatch.chdir(tmp_path)
    return folder


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    """Put a module in the place of one that imports torch; modules in it are still found."""
    fake = types.ModuleType(module)
    fake.__path__ = [str(Path(__file__).parents[2].joinpath(*module.split(".")))]
    vars(fake).update(names)
    monkeypatch.setitem(sys.modules, module, fake)


class Trainer:
    """Remembers what it was given; its run ends as `outcome` says."""

    given: tuple[Recipe, bool]
    outcome: Any = types.SimpleNamespace(interrupted=False)

    def __init__(self, recipe: Recipe, resume: bool) -> None:
        Trainer.given = (recipe, resume)

    def fit(self) -> Any:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def test_help_and_recipe_verbs_do_not_import_torch(shipped: Path) -> None:
    script = """
import sys
from pathlib import Path
import omnitrain.recipe.tree
from typer.testing import CliRunner
from omnitrain.cli.main import app
omnitrain.recipe.tree._PACKAGE = Path(".")
for call in (["--help"], ["ls"], ["show", "small"], ["show", "--schema"], ["--version"], ["run", "--help"]):
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, (call, result.output)
    assert "torch" not in sys.modules, call
"""
    path = str(Path(__file__).parents[2])
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{script}"], check=True, cwd=shipped.parent
    )


def test_python_m_omnitrain_reports_a_mistake_without_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omnitrain", "show", "no-such"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("omnitrain: no recipe `no-such`: looked for the file ")
    assert "Traceback" not in done.stderr


def test_version() -> None:
    assert call("--version").output == "omnitrain 0.2.0\n"


def test_ls_prints_name_and_summary(shipped: Path) -> None:
    (shipped / "other.yaml").write_text("model:\n")
    assert call("ls").output == "other\nsmall  A recipe with a summary\n"


def test_show_prints_the_file(shipped: Path) -> None:
    assert call("show", "small").output == RECIPE


def test_cp_does_not_overwrite_unless_forced(shipped: Path) -> None:
    assert call("cp", "small", "mine.yaml").output == "mine.yaml\n"
    Path("mine.yaml").write_text("edited")
    refused = call("cp", "small", "mine.yaml")
    assert (refused.exit_code, Path("mine.yaml").read_text()) == (2, "edited")
    assert "mine.yaml exists" in refused.stderr
    assert call("cp", "small", "mine.yaml", "--force").exit_code == 0
    assert Path("mine.yaml").read_text() == RECIPE


def test_cp_into_a_folder_keeps_the_name_and_needs_the_folder(shipped: Path) -> None:
    Path("folder").mkdir()
    assert call("cp", "small", "folder").exit_code == 0
    assert Path("folder/small.yaml").read_text() == RECIPE
    assert "no folder nowhere" in call("cp", "small", "nowhere/mine.yaml").stderr


def test_cp_onto_itself_or_to_where_nothing_can_be_written_is_refused(shipped: Path) -> None:
    itself = call("cp", "small", "recipes/small.yaml", "--force")
    assert (itself.exit_code, (shipped / "small.yaml").read_text()) == (2, RECIPE)
    assert itself.stderr == "omnitrain: recipes/small.yaml is `small` itself; choose another destination\n"
    nowhere = call("cp", "small", "/proc/small.yaml")
    assert nowhere.exit_code == 2
    assert "/proc/small.yaml cannot be written: No such file or directory" in nowhere.stderr


@pytest.mark.parametrize("name", ["/missing/folder", "missing", "/missing/folder/config.yaml"])
def test_check_of_nothing_says_that_there_is_neither_recipe_nor_model(shipped: Path, name: str) -> None:
    found = call("check", name)
    assert found.exit_code == 2
    assert f"no recipe `{name}`: looked for the file" in found.stderr
    assert found.stderr.endswith("; there is no model folder of that name either\n")


def test_check_of_a_model_takes_no_overrides(shipped: Path) -> None:
    found = call("check", "recipes", "train.steps=3")
    assert (found.exit_code, found.stderr) == (
        2,
        "omnitrain: recipes: this is a model; overrides such as `train.steps=3` apply only to recipes\n",
    )


def test_generate_refuses_a_model_that_is_not_omni_and_an_output_that_is_a_file(tmp_path: Path) -> None:
    vq = "tasks/quickstart/tokenizers/image_vq"
    other = call("generate", str(Path(__file__).parents[2] / vq), "--prompt", "hi")
    assert other.exit_code == 2
    assert "image_vq': its config is of type 'janus_vqgan', not 'omnitrain'" in other.stderr
    (tmp_path / "file").touch()
    refused = call("generate", str(tmp_path), "--prompt", "hi", "--output", str(tmp_path / "file"))
    assert refused.exit_code == 2
    assert "is a file" in refused.stderr


def test_a_shipped_recipe_is_meant_though_a_folder_has_its_name(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shipped.parent / "small").mkdir()
    stand_in(
        monkeypatch, "omnitrain.train.verbs.check", check_recipe=lambda recipe, num_ranks: ["a problem of the recipe"]
    )
    assert "a problem of the recipe" in call("check", "small").output


def test_check_lists_the_problems_and_exits_2(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "omnitrain.train.verbs.check", check_recipe=lambda recipe, num_ranks: [])
    assert call("check", "small").exit_code == 0
    stand_in(monkeypatch, "omnitrain.train.verbs.check", check_recipe=lambda recipe, num_ranks: ["one", "two"])
    found = call("check", "small", "train.steps=3")
    assert (found.exit_code, found.stderr) == (2, "omnitrain: 2 problems in small:\n  one\n  two\n")


def test_run_hands_over_the_recipe_with_its_overrides(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "omnitrain.train.trainer", Trainer=Trainer)
    assert call("run", "small", "train.steps=7", "output_dir=here", "--resume").exit_code == 0
    recipe, resume = Trainer.given
    assert (recipe.train.steps, recipe.output_dir, resume) == (7, "here", True)
    assert call("run", "small", "output_dir=here", "--auto-resume").exit_code == 0
    assert Trainer.given[1] == "auto"
    refused = call("run", "small", "--resume", "--auto-resume")
    assert refused.exit_code == 2 and "--resume and --auto-resume exclude each other" in refused.stderr


def test_run_of_a_folder_takes_the_recipe_in_it_which_may_have_moved(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "omnitrain.train.trainer", Trainer=Trainer)
    moved = shipped / "moved: here"
    moved.mkdir()
    (moved / "recipe.yaml").write_text(f"{RECIPE}train: {{steps: 5, log_every: 3}}\noutput_dir: runs/before\n")
    assert call("run", str(moved), "train.steps=7").exit_code == 0
    recipe, resume = Trainer.given
    assert (recipe.train.steps, recipe.train.log_every, recipe.output_dir, resume) == (7, 3, str(moved), True)
    for arguments, message in (
        (
            [str(shipped)],
            f"{shipped} is not the folder of a run (no recipe.yaml); name the output_dir of one, or a recipe",
        ),
        (
            [str(moved), "output_dir=x"],
            f"{moved} is the folder of a run, which continues there, not in x; remove output_dir=",
        ),
        ([str(moved), "--train.steps", "9"], "--train.steps: keys of a recipe have no dashes; write `train.steps=9`"),
    ):
        refused = call("run", *arguments)
        assert (refused.exit_code, refused.stderr) == (2, f"omnitrain: {message}\n")


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (types.SimpleNamespace(interrupted=True, is_terminated=False), 130, ""),
        (types.SimpleNamespace(interrupted=True, is_terminated=True), 143, ""),
        (KeyboardInterrupt(), 130, "omnitrain: interrupted\n"),
        (DataError("no file x.parquet"), 2, "omnitrain: no file x.parquet\n"),
    ],
)
def test_run_ends_with_the_code_of_its_outcome(
    outcome: Any, code: int, message: str, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "outcome", outcome)
    stand_in(monkeypatch, "omnitrain.train.trainer", Trainer=Trainer)
    ended = call("run", "small")
    assert (ended.exit_code, ended.stderr) == (code, message)
    assert ended.stdout.endswith("omnitrain run runs/default\n") == isinstance(outcome, types.SimpleNamespace)


def test_run_with_several_ranks_launches_itself_and_ends_as_they_do(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def launch(arguments: Callable[[], list[str]], nproc: int, **options: Any) -> int:
        first = list(arguments())
        Path("runs/default").mkdir(parents=True)
        Path("runs/default/recipe.yaml").write_text(RECIPE)  # the run begins
        fits = [ranks for ranks in range(1, 9) if options["fits"](ranks)]
        given.extend([first, arguments()[len(first) :], nproc, options["max_restarts"], options["stop_seconds"], fits])
        return 130

    monkeypatch.setattr("omnitrain.train.launch.launch.launch_with_restarts", launch)
    monkeypatch.setattr("omnitrain.train.launch.launch.num_cores", lambda: 2)
    overrides = ["train.stop_seconds=7", "train.device=cpu", "parallel.default.ulysses=2"]
    ended = call("run", "small", *overrides, "--nproc", "4", "--max-restarts", "4")
    assert ended.exit_code == 130
    assert ended.stderr.startswith("omnitrain: --nproc 4 on 2 cores: about 2 ranks share a core, so ")
    first = ["-m", "omnitrain", "run", "small", *overrides]
    assert given == [first, ["--auto-resume"], 4, 4, 7.0, [2, 4, 6, 8]]
    assert call("run", "small", "train.stps=7", "--nproc", "3").exit_code == 2  # found before ranks are started
    assert "it needs --nproc 2 or more" in call("run", "small", "--max-restarts", "1").stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("resume runs/mine", "run FOLDER"),
        ("schedule small --nproc 2", "show RECIPE --schedule"),
        ("preview small", "show RECIPE --packs"),
        ("data stats small", "show RECIPE --stats"),
        ("data --help", "show RECIPE --stats"),
        ("schema", "show --schema"),
        ("chat runs/mine", "generate CHECKPOINT --chat"),
    ],
)
def test_an_old_command_is_refused_with_the_name_of_the_new_one(old: str, new: str) -> None:
    refused = call(*old.split())
    message = f"omnitrain: there is no `omnitrain {old.split()[0]}`; write `omnitrain {new}`\n"
    assert (refused.exit_code, refused.stdout, refused.stderr) == (2, "", message)


def test_the_commands() -> None:
    verbs = ["ls", "show", "cp", "check", "plan", "run", "verify", "profile", "generate", "export", "report", "doctor"]
    assert sorted(typer.main.get_command(app).commands) == sorted(verbs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--packs", "show: found no RECIPE; name a YAML file or a shipped recipe (`omnitrain ls`), or add --schema"),
        ("small --packs --stats", "--packs and --stats exclude each other"),
        ("small --rows 3", "--rows belongs to `show RECIPE --stats`; add that option, or remove --rows"),
        ("small --packs --json f", "--json belongs to `show RECIPE --stats or --schedule`; add"),
        ("small train.steps=3", "show prints the file small, to which overrides such as `train.steps=3` do not apply"),
        ("small --schema", "--schema is the same for all recipes; remove small"),
        ("small --schedule --forward 0", "--forward: found 0; expected a number of seconds above 0"),
    ],
)
def test_show_refuses_what_does_not_belong_to_what_it_shows(arguments: str, message: str, shipped: Path) -> None:
    refused = call("show", *arguments.split())
    assert refused.exit_code == 2 and refused.stderr.startswith(f"omnitrain: {message}")


@pytest.mark.parametrize("options", [(), ("--prompt", "a", "--chat"), ("--chat", "--image", "a.png")])
def test_generate_needs_one_source_of_messages(options: tuple[str, ...]) -> None:
    refused = call("generate", "runs/mine", *options)
    assert refused.exit_code == 2 and "generate needs one of --prompt TEXT" in refused.stderr


def test_an_unexpected_error_keeps_its_traceback(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "outcome", ZeroDivisionError("a bug"))
    stand_in(monkeypatch, "omnitrain.train.trainer", Trainer=Trainer)
    assert isinstance(call("run", "small").exception, ZeroDivisionError)


def test_a_recipe_typo_exits_2_before_anything_heavy_is_imported(shipped: Path) -> None:
    mistake = call("run", "small", "train.stps=7")
    assert mistake.exit_code == 2
    assert "train.stps: unknown key, found 7; did you mean `steps`?" in mistake.stderr


def test_generate_prints_the_parts_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Answerer:
        def __init__(self, checkpoint: Path, **options: Any) -> None:
            given.update(options, checkpoint=checkpoint)

        def answer(self, prompt: str, media: Any) -> Any:
            given.update(media, prompt=prompt)
            return None, ["a seven", "out/answer_0.png"]

    cut = "image_decoder did not finish its last item"
    fakes = {"what_was_cut": lambda answered, limit: cut, "require_files": lambda media: None}
    stand_in(monkeypatch, "omnitrain.train.verbs.answer", Answerer=Answerer, **fakes)
    said = call(
        "generate", "run", "--prompt", "draw", "--image", "a.png", "--image", "b.png", "--output", "out", "--seed", "3"
    )
    assert (said.stdout, said.stderr) == ("a seven\nout/answer_0.png\n", f"omnitrain: {cut}\n")
    assert (given["image"], given["audio"], given["prompt"]) == (["a.png", "b.png"], [], "draw")
    assert (given["checkpoint"], given["output_dir"], given["seed"]) == (Path("run"), Path("out"), 3)
    assert given["temperature"] == 0.0
    monkeypatch.setattr(Answerer, "answer", lambda self, prompt, media: (None, [""]))
    said = call("generate", "run", "--prompt", "draw")
    assert said.stderr == f"omnitrain: the answer has no text and no media\nomnitrain: {cut}\n"


def test_schema_and_doctor_print_and_exit_0() -> None:
    assert json.loads(call("show", "--schema").output)["required"] == ["model", "data"]
    examined = call("doctor")
    assert examined.exit_code == 0
    assert "versions\n" in examined.output
