import subprocess
import sys
import tomllib
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import omnitrain
from omnitrain import packages
from omnitrain.packages import WINDOW

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


def test_exported_names_are_those_that_have_a_home() -> None:
    assert sorted(omnitrain._HOMES) == omnitrain.__all__


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
