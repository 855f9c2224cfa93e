import re
import subprocess
import sys
from pathlib import Path

import pytest

import omnitrain

ROOT = Path(__file__).parents[1]


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


@pytest.mark.parametrize(("old", "new"), [("AppliedComponent", "ComponentLayout"), ("AppliedLayout", "ModelLayout")])
def test_a_renamed_export_works_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"omnitrain.{old} is now omnitrain.{new}"):
        assert getattr(omnitrain, old) is getattr(omnitrain, new)
