"""Examine this machine: versions, devices, memory, optional packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from omnitrain.packages import WINDOW, install_command, installed_version, torchvision_problem, untested
from omnitrain.parallel.environment import VARIABLES, available_memory, missing_variables

_GIB = 2**30
_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"  # of a checkout; an installed package has none there


@dataclass(frozen=True)
class DoctorLine:
    """One line of the report; ``ok`` is True (fine), False (a problem) or None (missing, but optional)."""

    section: str
    name: str
    found: str
    ok: bool | None


@dataclass(frozen=True)
class OptionalPackage:
    """An optional package: its module, distribution and purpose, and the extra of omnitrain that installs it."""

    module: str
    distribution: str
    purpose: str
    extra: str | None


BACKENDS = (
    OptionalPackage("torchvision", "torchvision", "HF processors of videos, and of images of any size", "vision"),
    OptionalPackage("liger_kernel", "liger-kernel", "fused losses and norms on GPU", "liger"),
    OptionalPackage("flash_attn", "flash-attn", "attention kernels on GPU", "flash"),
    OptionalPackage("triton", "triton", "kernels compiled at run time; installed with torch for CUDA", None),
    OptionalPackage("av", "av", "reads video files", "video"),
    OptionalPackage("peft", "peft", "LoRA", "lora"),
    OptionalPackage("torchao", "torchao", "optimizer states of 8 bits", "low-bit"),
    OptionalPackage("diffusers", "diffusers", "latents of images", "vae"),
    OptionalPackage("nixl_cu12", "nixl-cu12", "writes messages into other ranks' memory", "nixl"),
    OptionalPackage("tensorboard", "tensorboard", "draws metrics", "track"),
    OptionalPackage("wandb", "wandb", "draws metrics", "wandb"),
    OptionalPackage("trackio", "trackio", "draws metrics", "trackio"),
)


def examine(*, imports: bool = True) -> list[DoctorLine]:
    """Examine the machine. A broken package is a finding, never an exception.

    A run does not import the optional packages, because those that it does not use would cost memory.
    """
    optional = map(_backend if imports else _installed, BACKENDS)
    return [*_versions(), *_devices(), *_memory(), *_environment(), *optional]


def render(findings: list[DoctorLine]) -> str:
    """Return the findings as text, section by section, with a verdict at the end."""
    lines: list[str] = []
    width = max(len(finding.name) for finding in findings)
    for index, finding in enumerate(findings):
        if index == 0 or findings[index - 1].section != finding.section:
            lines += ["", finding.section]
        mark = {True: "ok", False: "!!", None: "--"}[finding.ok]
        lines.append(f"  {mark}  {finding.name:<{width}}  {finding.found}")
    problems = sum(finding.ok is False for finding in findings)
    verdict = "no problem found" if problems == 0 else f"problems: {problems}, marked !!"
    return "\n".join([*lines[1:], "", verdict])


def _versions(pyproject: Path = _PYPROJECT) -> list[DoctorLine]:
    """Compare versions with a checkout's pyproject.toml (editable installs keep old metadata), else the metadata."""
    python = DoctorLine("versions", "python", platform.python_version(), True)
    try:
        metadata = importlib.metadata.metadata("omnitrain")
    except importlib.metadata.PackageNotFoundError:
        return [
            python,
            DoctorLine("versions", "omnitrain", "not installed; run `make install` or `pip install .`", False),
        ]
    installed = list(map(Requirement, metadata.get_all("Requires-Dist") or []))
    wanted, supported = installed, metadata["Requires-Python"] or ""
    omnitrain = DoctorLine("versions", "omnitrain", metadata["Version"], True)
    project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {}) if pyproject.is_file() else {}
    if project.get("name") == "omnitrain":  # not a project which has a copy of the package
        wanted, supported = _requirements_of(project), project["requires-python"]
        if set(map(_normal, wanted)) != set(map(_normal, installed)):
            stale = f"{metadata['Version']}, installed with other requirements than those of {pyproject}"
            omnitrain = DoctorLine("versions", "omnitrain", f"{stale}; run `make install` or `pip install -e .`", False)
    return [
        omnitrain,
        _in_range("python", platform.python_version(), SpecifierSet(supported)),
        *(_requirement(one) for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})),
    ]


def _requirements_of(project: Mapping[str, Any]) -> list[Requirement]:
    """Return a project's requirements; those of extras have the marker of installed metadata."""
    extras = project.get("optional-dependencies", {}).items()
    return [
        *map(Requirement, project["dependencies"]),
        *(Requirement(f'{one}; extra == "{extra}"') for extra, several in extras for one in several),
    ]


def _normal(requirement: Requirement) -> tuple[str, ...]:
    return requirement.name, str(requirement.specifier), str(requirement.marker or "")


def _requirement(requirement: Requirement) -> DoctorLine:
    version = installed_version(requirement.name)
    if version is None:
        return DoctorLine("versions", requirement.name, f"missing; pip install '{requirement}'", False)
    finding = _in_range(requirement.name, version, requirement.specifier)
    if finding.ok and requirement.name in WINDOW and (problem := untested(requirement.name, version)):
        return replace(finding, found=problem, ok=None)
    return finding


def _in_range(name: str, version: str, supported: SpecifierSet) -> DoctorLine:
    ok = supported.contains(Version(version), prereleases=True)
    bounds = f" (supported: {supported})" if str(supported) else ""
    return DoctorLine(
        "versions", name, f"{version}{bounds}" if ok else f"{version} (not supported; expected {supported})", ok
    )


def _devices() -> list[DoctorLine]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = DoctorLine("devices", "cpu", f"{platform.machine()}, {cores} cores usable", True)
    try:
        import torch
    except Exception as error:  # a broken torch raises OSError as well as ImportError
        return [cpu, DoctorLine("devices", "torch", f"does not import: {_one_line(error)}", False)]
    if torch.cuda.is_available():
        return [cpu, *(_gpu(index) for index in range(torch.cuda.device_count()))]
    return [cpu, DoctorLine("devices", "cuda", f"none: {_why_no_cuda()}", None)]


def _gpu(index: int) -> DoctorLine:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    memory = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    return DoctorLine("devices", f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, {memory}", True)


def _why_no_cuda() -> str:
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # a broken driver raises anything
        return _one_line(error)
    return f"torch is built for CUDA {torch.version.cuda} but sees no device"


def _memory() -> list[DoctorLine]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = available_memory()
    free = "" if available is None else f"{available / _GIB:.1f} GiB available of "
    return [DoctorLine("memory", "host", f"{free}{total / _GIB:.1f} GiB", True)]


def _environment() -> list[DoctorLine]:
    """Say which variables for GPUs are set, and how many files a process may open."""
    missing = {variable.name for variable in missing_variables()}
    found = [
        DoctorLine("environment", name, f"not set; omnitrain sets {value}: {why}", None)
        if name in missing
        else DoctorLine("environment", name, os.environ.get(name) or f"{older}={os.environ[older]}", True)
        for name, value, why, older in VARIABLES
    ]
    known = {name for variable in VARIABLES for name in (variable.name, variable.older)}
    of_nccl = [name for name in sorted(os.environ) if name.startswith(("NCCL_", "TORCH_NCCL_")) and name not in known]
    found += [DoctorLine("environment", name, f"{os.environ[name]}, set by you", True) for name in of_nccl]
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [*found, DoctorLine("environment", "open files", f"{soft}; omnitrain raises the limit to {most}", True)]


def _backend(backend: OptionalPackage) -> DoctorLine:
    version = installed_version(backend.distribution)
    try:
        importlib.import_module(backend.module)
    except Exception as error:  # a kernel built for another torch raises anything
        torchvision = torchvision_problem()
        if torchvision is not None and backend.module == "torchvision":
            return DoctorLine("optional", backend.module, torchvision, False)
        if torchvision is not None and version is not None:  # peft, for example, imports it through transformers
            unknown = f"{version} does not import; torchvision, which is broken (above), may be the reason"
            return DoctorLine("optional", backend.module, unknown, None)
        if version is not None:
            broken = f"{version} is installed but does not import: {_one_line(error)}"
            return DoctorLine("optional", backend.module, broken, False)
        remedy = f"; {install_command(backend.extra)}" if backend.extra else ""
        return DoctorLine("optional", backend.module, f"missing ({_one_line(error)}): {backend.purpose}{remedy}", None)
    return DoctorLine("optional", backend.module, f"{version or 'unknown version'}: {backend.purpose}", True)


def _installed(backend: OptionalPackage) -> DoctorLine:
    version = installed_version(backend.distribution)
    found = version or f"not installed: {backend.purpose}"
    return DoctorLine("optional", backend.module, found, version is not None or None)


def _one_line(message: object) -> str:
    return " ".join(str(message).split()) or type(message).__name__
