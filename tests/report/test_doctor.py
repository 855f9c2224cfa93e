import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from omnitrain.report import doctor


def test_report_names_every_section_and_never_raises() -> None:
    text = doctor.render(doctor.examine())
    for name in ("versions", "devices", "memory", "optional", "python", "cpu", "host", "flash_attn", "peft"):
        assert name in text


def test_missing_backend_is_allowed_and_says_how_to_get_it() -> None:
    finding = doctor._backend(doctor.Backend("no_such_module", "no-such", "nothing", "video"))
    assert finding.ok is None
    assert finding.found == "missing (No module named 'no_such_module'): nothing; pip install 'omnitrain[video]'"


def test_backend_that_is_installed_but_broken_shows_the_import_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_kernels.py").write_text("raise OSError('undefined symbol:\\n _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "_installed_version", lambda name: "2.0")
    finding = doctor._backend(doctor.Backend("broken_kernels", "broken-kernels", "speed", "gpu"))
    assert finding.ok is False
    assert finding.found == "2.0 is installed but does not import: undefined symbol: _ZN3c10"


def test_version_outside_of_the_supported_range_is_a_problem() -> None:
    supported = SpecifierSet(">=2.11,<2.14")
    assert doctor._in_range("torch", "2.13.0+cpu", supported).ok is True
    assert doctor._in_range("torch", "2.14.1", supported).ok is False
    assert doctor._requirement(Requirement("no-such-package>=1")).found == "missing; pip install 'no-such-package>=1'"


@pytest.mark.parametrize(("version", "num_findings"), [("2.9.1", 1), ("2.10.0", 0), ("2.13.0+cpu", 0)])
def test_torch_with_slow_conv3d_is_flagged(version: str, num_findings: int) -> None:
    assert len(doctor._bad_pairs(lambda name: version)) == num_findings


def test_torch_that_does_not_import_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [finding.ok for finding in doctor._devices()] == [True, False]
    assert "problems: 1, marked !!" in doctor.render(doctor._devices())
