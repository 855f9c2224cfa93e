import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import omnitrain
from omnitrain import packages
from omnitrain.cli.main import app
from omnitrain.packages import WINDOW
from omnitrain.recipe import find_recipe

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_import_is_lazy() -> None:
    script = (
        "import sys, omnitrain; assert not {'torch', 'pydantic', 'transformers'} & set(sys.modules); dir(omnitrain)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", omnitrain.__all__)
def test_every_exported_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(omnitrain, name).__name__ == name
    assert name in dir(omnitrain)


OLD_NAMES = {  # module -> names that `import omnitrain as ot` had at the top
    "checkpoint": "load_optimizer save_optimizer",
    "data": "ChatRenderer MediaSpan Rejected TemplateRenderer Waveform open_sources pack_all",
    "models": "Answer OmniOutput merge_lora",
    "notebook": "RankError RankResults data_stats launch preview",
    "optim": "gradient_norm",
    "parallel": "ComponentLayout ModelLayout ParallelState VerifyReport VerifyRow layout_of",
    "recipe": "ChatFormat DataSource Layout Precision Sampling parse_layout",
}


@pytest.mark.parametrize(("module", "name"), [(m, name) for m, names in OLD_NAMES.items() for name in names.split()])
def test_a_name_that_is_not_at_the_top_any_more_says_where_it_is_and_is_there(module: str, name: str) -> None:
    with pytest.raises(AttributeError) as told:
        getattr(omnitrain, name)
    assert str(told.value) == f"omnitrain has no {name}: use ot.{module}.{name}"
    assert module in dir(omnitrain) and getattr(getattr(omnitrain, module), name).__name__ == name


@pytest.mark.parametrize("name", ["gathered", "loss_peers", "serving"])
def test_a_name_that_no_code_needs_any_more_says_to_leave_it_out(name: str) -> None:
    with pytest.raises(AttributeError, match=f"omnitrain has no {name}: leave it out"):
        getattr(omnitrain, name)


def test_at_most_28_names_are_at_the_top() -> None:
    assert len(omnitrain.__all__) <= 28


@pytest.mark.parametrize("module", OLD_NAMES)
def test_a_module_of_names_loads_on_first_use(module: str) -> None:
    assert omnitrain.__getattr__(module) is importlib.import_module(f"omnitrain.{module}")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'OmniModell'"):
        omnitrain.OmniModell  # noqa: B018


def test_dir_lists_each_name_once() -> None:
    omnitrain.Recipe  # noqa: B018
    assert [name for name, count in Counter(dir(omnitrain)).items() if count > 1] == []


def _lowest(requirements: list[str], package: str) -> str:
    """The only bound of a package among requirements, which is a lower one."""
    (bound,) = next(r.specifier for r in map(Requirement, requirements) if r.name == package)
    assert bound.operator == ">="
    return bound.version


@pytest.mark.parametrize("package", WINDOW)
def test_the_window_begins_with_the_lowest_version_that_installs_and_has_no_upper_bound(package: str) -> None:
    assert WINDOW[package][0] == _lowest(PROJECT["dependencies"], package)


def test_the_extra_vision_has_the_torchvision_of_the_lowest_torch() -> None:
    minor = Version(_lowest(PROJECT["dependencies"], "torch")).minor
    assert _lowest(PROJECT["optional-dependencies"]["vision"], "torchvision") == f"0.{minor + 15}"


@pytest.mark.parametrize("package", WINDOW)
def test_ci_runs_with_a_version_of_the_window(package: str) -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    lowest, highest = (Version(minor).release for minor in WINDOW[package])
    assert lowest <= Version(pins[package]).release[:2] <= highest


def _warnings(monkeypatch: pytest.MonkeyPatch, found: dict[str, str], times: int = 1) -> list[str]:
    monkeypatch.setattr(packages, "installed_version", found.get)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            packages.warn_of_untested_versions()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("package", "inside", "outside"),
    [
        ("torch", ["2.11.0+cu130", "2.15.9"], ["2.10.1", "2.16.0"]),
        ("transformers", ["5.23.0", "5.24.3"], ["5.22", "6.0"]),
    ],
)
def test_a_version_outside_the_window_is_a_warning_once_and_on_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, package: str, inside: list[str], outside: list[str]
) -> None:
    monkeypatch.setattr(packages, "os", SimpleNamespace(environ={}))
    assert [_warnings(monkeypatch, {package: version}) for version in inside] == [[], []]
    for version in outside:
        monkeypatch.setattr(packages, "os", SimpleNamespace(environ={}))
        (message,) = _warnings(monkeypatch, {package: version}, times=2)
        assert f"omnitrain was tested with {package} " in message and f"found {version}." in message
        monkeypatch.setattr(packages, "os", SimpleNamespace(environ={"RANK": "1"}))
        assert _warnings(monkeypatch, {package: version}) == []


def test_make_says_that_an_existing_environment_keeps_its_python(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    commands = {".venv/bin/python": "Python 3.11.7", "python3.12": "Python 3.12.3", "python3.11": "Python 3.11.7"}
    for name, version in commands.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv" / ".installed").touch()
    said = {
        asked: subprocess.run(
            ["make", "install", *asked], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stderr
        for asked in ((), ("PYTHON=./python3.11",), ("PYTHON=./python3.12",))
    }
    assert list(said.values()) == [
        "",
        "",
        ".venv has Python 3.11.7 and stays so; for PYTHON=./python3.12 (Python 3.12.3), first remove it: rm -r .venv\n",
    ]


def test_version_is_the_one_of_the_metadata() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert declared[1] == omnitrain.__version__


def test_constraints_pin_every_direct_dependency_and_the_tested_torch() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    project = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    dev = re.search(r"^dev = \[(.*?)\]", project, re.MULTILINE)
    assert block is not None
    assert dev is not None
    needed = re.findall(r'"([\w-]+)', block[1] + dev[1])
    pinned = {name.lower() for name in pins}
    assert [name for name in needed if name not in pinned] == []
    assert (pins["torch"], pins["transformers"]) == ("2.13.0", "5.23.0")
    assert f"TORCH := torch=={pins['torch']}" in (ROOT / "Makefile").read_text()


def test_the_version_is_the_same_in_all_files() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.findall(r"^## \[(\S+)\] - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)
    assert released[0] == (PROJECT["version"], str(citation["date-released"]))
    assert omnitrain.__version__ == PROJECT["version"] == citation["version"]


def test_hooks_before_a_commit_have_the_ruff_of_the_constraints() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert f"ruff=={repository['rev'].removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text()


def test_the_forms_of_issues_have_all_that_a_form_needs() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert form["name"] and form["description"] and form["labels"]
        assert all(field["id"] and field["attributes"]["label"] for field in form["body"]), path


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_install_the_torch_and_the_extras_that_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    extras = {extra for found in re.findall(r"\.\[([\w,-]+)\]", text) for extra in found.split(",")}
    assert extras and extras <= set(PROJECT["optional-dependencies"])
    torch = re.search(r"^TORCH := torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch and torch[1] in text
    assert all((ROOT / file).is_file() for file in re.findall(r"-c (\S+)", text))
    (program,) = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])
    assert program in PROJECT["scripts"]
    (words,) = re.findall(r"docker run .* omnitrain\S* (run .*)$", text, re.MULTILINE)
    verb, recipe, *options = words.split()
    given = typer.main.get_command(app).commands[verb].make_context(verb, [recipe, *options]).params
    assert given["recipe"] == "my.yaml" or find_recipe(given["recipe"]).is_file()


def test_the_batch_file_is_one_that_a_shell_reads_and_starts_the_run_again() -> None:
    path = ROOT / "docs" / "train.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    assert {"#SBATCH --requeue", "#SBATCH --signal=TERM@300"} <= set(path.read_text().splitlines())
