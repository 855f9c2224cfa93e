"""`pip install .` ships the recipes and says that omnitrain has types."""

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
    for name in ("omnitrain", "recipes"):
        shutil.copytree(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(source)], check=True)
    return next(folder.glob("omnitrain-*.whl"))


@pytest.mark.slow
def test_wheel_contains_the_recipes_and_runs_without_the_checkout(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with zipfile.ZipFile(built_wheel(tmp_path)) as wheel:
        wheel.extractall(target)
    assert {path.name for path in (target / "omnitrain" / "recipes").glob("*.yaml")} == {
        path.name for path in (ROOT / "recipes").glob("*.yaml")
    }
    assert (target / "omnitrain" / "py.typed").exists()  # a user's mypy reads our types
    script = "import omnitrain.recipe as r; print(r.recipes_folder(), *r.list_recipes())"
    listed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=target)
    names = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert listed.stdout.split() == [str(target / "omnitrain" / "recipes"), *names]
