import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import omnitrain
from omnitrain import packages
from omnitrain.cli.main import app
from omnitrain.errors import UserError
from omnitrain.report import doctor


def test_report_names_every_section_and_never_raises() -> None:
    text = doctor.render(doctor.examine())
    for name in ("versions", "devices", "memory", "optional", "python", "cpu", "host", "flash_attn", "peft"):
        assert name in text


def test_a_checkout_with_newer_requirements_than_those_it_was_installed_with_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install keeps its metadata; a `git pull` changes pyproject.toml."""
    (tmp_path / "omnitrain-0.1.0.dist-info").mkdir()
    lines = ["Name: omnitrain", "Version: 0.1.0", "Requires-Dist: torch<4,>=1", 'Requires-Dist: av; extra == "video"']
    (tmp_path / "omnitrain-0.1.0.dist-info" / "METADATA").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    project = '[project]\nname = "omnitrain"\nrequires-python = ">=3.11"\ndependencies = ["torch>={}, <4"]\n'
    project += 'optional-dependencies = {{video = ["av"]}}\n'
    (tmp_path / "pyproject.toml").write_text(project.format(1))
    assert all(finding.ok for finding in doctor._versions(tmp_path / "pyproject.toml"))
    (tmp_path / "pyproject.toml").write_text(project.format(3))
    stale, python, torch = doctor._versions(tmp_path / "pyproject.toml")
    assert stale.ok is False and stale.found.endswith("run `make install` or `pip install -e .`")
    assert python.ok and torch.ok is False and torch.found.endswith("(not supported; expected <4,>=3)")
    assert all(finding.ok for finding in doctor._versions(tmp_path / "none.toml"))


def test_missing_backend_is_allowed_and_says_how_to_get_it() -> None:
    finding = doctor._backend(doctor.OptionalPackage("no_such_module", "no-such", "nothing", "video"))
    assert finding.ok is None
    assert finding.found == "missing (No module named 'no_such_module'): nothing; pip install 'omnitrain[video]'"


def test_backend_that_is_installed_but_broken_shows_the_import_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_kernels.py").write_text("raise OSError('undefined symbol:\\n _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "installed_version", lambda name: "2.0")
    finding = doctor._backend(doctor.OptionalPackage("broken_kernels", "broken-kernels", "speed", "gpu"))
    assert finding.ok is False
    assert finding.found == "2.0 is installed but does not import: undefined symbol: _ZN3c10"


@pytest.fixture
def torchvision_of_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in that fails as torchvision 0.24.0 does with a torch that it was not built for."""
    packages.installed_version.cache_clear()
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    (tmp_path / "torchvision-0.24.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.24.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.24.0\n")
    (tmp_path / "reads_images.py").write_text("raise ModuleNotFoundError('Could not import module Bloom')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages, "torch_version", lambda: "2.13.0+cpu")
    yield
    packages.installed_version.cache_clear()


def test_a_torchvision_that_does_not_fit_is_one_line_with_the_command(
    torchvision_of_another_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = (
        "torchvision 0.24.0 does not fit torch 2.13.0+cpu (operator torchvision::nms does not exist), and transformers "
        "imports it; run: pip uninstall -y torchvision && pip install torchvision torch==2.13.0+cpu "
        "--index-url https://download.pytorch.org/whl/cpu"
    )
    for words in (["check", "quickstart"], ["run", "quickstart"], ["generate", "runs/none", "--prompt", "draw a 7"]):
        with pytest.raises(SystemExit) as ended:
            app(words)
        assert (ended.value.code, capsys.readouterr().err) == (2, f"omnitrain: {problem}\n")
    with pytest.raises(UserError, match=r"torchvision 0\.24\.0 does not fit torch"):
        omnitrain.__getattr__("build_omni_model")


def test_torchvision_is_blamed_for_what_fails_with_it(
    torchvision_of_another_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: "2.0")
    readers = [doctor.BACKENDS[0], doctor.OptionalPackage("reads_images", "reads-images", "images", None)]
    findings = [doctor._backend(backend) for backend in readers]
    assert [(finding.name, finding.ok) for finding in findings] == [("torchvision", False), ("reads_images", None)]
    assert "pip uninstall -y torchvision" in findings[0].found
    assert findings[1].found == "2.0 does not import; torchvision, which is broken (above), may be the reason"


@pytest.mark.parametrize(
    ("torch", "command"),
    [
        ("2.13.0", "pip install torchvision torch==2.13.0"),
        (
            "2.13.0+cu130",
            "pip install torchvision torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130",
        ),
        ("2.13.0a0+nv26.10", "build torchvision from its source (no wheel fits torch 2.13.0a0+nv26.10)"),
    ],
)
def test_the_command_for_torchvision_keeps_the_installed_torch(
    torch: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "torch_version", lambda: torch)
    assert packages.install_command("vision") == command


def test_version_outside_of_the_supported_range_is_a_problem() -> None:
    supported = SpecifierSet(">=2.13,<2.14")
    assert doctor._in_range("torch", "2.13.0+cpu", supported).ok is True
    assert doctor._in_range("torch", "2.14.1", supported).ok is False
    assert doctor._requirement(Requirement("no-such-package>=1")).found == "missing; pip install 'no-such-package>=1'"


def test_a_torch_that_omnitrain_was_not_tested_with_is_said_and_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(version: str) -> doctor.DoctorLine:
        monkeypatch.setattr(doctor, "installed_version", lambda name: version)
        return doctor._requirement(Requirement("torch>=2.11"))

    assert [found(version).ok for version in ("2.10.1", "2.11.0", "2.15.1", "2.16.0")] == [False, True, True, None]
    assert "tested with torch 2.11 to 2.15, and uses private names of it; found 2.16.0" in found("2.16.0").found


def test_torch_that_does_not_import_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [finding.ok for finding in doctor._devices()] == [True, False]
    assert "problems: 1, marked !!" in doctor.render(doctor._devices())
