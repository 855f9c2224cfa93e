"""The wheel ships recipes, tasks and types, and runs the quickstart without the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def built_wheel(folder: Path) -> Path:
    """Build a wheel in a folder, from a copy of the sources: setuptools leaves files beside them."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("omnitrain", "recipes", "tasks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(source)], check=True)
    return next(folder.glob("omnitrain-*.whl"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that has what the wheel has."""
    folder = tmp_path_factory.mktemp("wheel")
    built = built_wheel(folder)
    assert built.stat().st_size < 10e6
    with zipfile.ZipFile(built) as wheel:
        wheel.extractall(folder / "target")
    return folder / "target"


@pytest.mark.slow
def test_wheel_contains_the_recipes_and_types(target: Path) -> None:
    assert {path.name for path in (target / "omnitrain" / "recipes").glob("*.yaml")} == {
        path.name for path in (ROOT / "recipes").glob("*.yaml")
    }
    assert (target / "omnitrain" / "py.typed").exists()  # a user's mypy reads our types
    script = "import omnitrain.recipe as r; print(r.recipes_folder(), *r.list_recipes())"
    listed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=target)
    names = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert listed.stdout.split() == [str(target / "omnitrain" / "recipes"), *names]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["run", "quickstart", "train.steps=2", "evaluation.examples_per_source=1", "train.report=false"],
        ["verify", "quickstart", "--layouts", "dp2", "--samples", "2"],
    ],
    ids=lambda words: words[0],
)
def test_the_wheel_runs_the_quickstart_in_an_empty_folder(target: Path, tmp_path: Path, words: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "omnitrain", *words]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    if words[0] == "run":
        recipe = (tmp_path / "runs" / "quickstart" / "recipe.yaml").read_text()
        assert f"{target}/omnitrain/tasks/quickstart/data/train.parquet" in recipe
