"""Other packages: versions that omnitrain was tested with, and the commands that install optional ones."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import warnings

from packaging.version import Version

from omnitrain.errors import UserError

# The lowest and the highest minor version that `make test-versions` runs with. omnitrain uses private names of both
# packages (torch_private.py, transformers_private.py), which another version may lack.
WINDOW = {"torch": ("2.11", "2.15"), "transformers": ("5.23", "5.24")}
_WARNED = "OMNITRAIN_WARNED_OF_VERSIONS"  # in the environment, which the processes of a run inherit

_INDEX = "https://download.pytorch.org/whl"
_LABEL_WITH_INDEX = re.compile(r"cpu|cu\d+|rocm[\d.]+|xpu")  # of a torch version, after the plus sign


def warn_of_untested_versions() -> None:
    """Warn of a torch or transformers that omnitrain was not tested with, once in all processes of a run."""
    if _WARNED in os.environ or os.environ.get("RANK", "0") != "0":
        return
    for package in WINDOW:
        version = installed_version(package)
        if version is not None and (problem := untested(package, version)):
            os.environ[_WARNED] = "1"
            warnings.warn(problem, stacklevel=3)


def untested(package: str, version: str) -> str | None:
    """Return what to say of an installed version of torch or transformers; None: it is in :data:`WINDOW`."""
    lowest, highest = WINDOW[package]
    if Version(lowest).release <= Version(version).release[:2] <= Version(highest).release:
        return None
    return (
        f"omnitrain was tested with {package} {lowest} to {highest}, and uses private names of it; found {version}. "
        f"If something fails that should not, run: pip install '{package}=={highest}.*'"
    )


def install_command(extra: str) -> str:
    """Return the command that installs an extra of omnitrain and leaves the installed torch as it is."""
    if extra != "vision":  # flash-attn compiles against the installed torch, which an isolated build does not see
        return f"pip install 'omnitrain[{extra}]'" + " --no-build-isolation" * (extra == "flash")
    torch = torch_version()  # named, so that pip chooses a torchvision that fits it instead of another torch
    label = torch.partition("+")[2]
    if label and not _LABEL_WITH_INDEX.fullmatch(label):
        return f"build torchvision from its source (no wheel fits torch {torch})"
    return f"pip install torchvision torch=={torch}" + (f" --index-url {_INDEX}/{label}" if label else "")


def require_fitting_torchvision() -> None:
    """Raise a UserError if torchvision was built for another torch: transformers imports it, and fails deep inside."""
    if problem := torchvision_problem():
        raise UserError(problem)


def torchvision_problem() -> str | None:
    """Return why the installed torchvision does not import, and what to do; None: it imports, or is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # a torchvision built for another torch raises RuntimeError, OSError or ImportError
        versions = f"torchvision {installed_version('torchvision')} does not fit torch {torch_version()}"
        return (
            f"{versions} ({' '.join(str(error).split())}), and transformers imports it; "
            f"run: pip uninstall -y torchvision && {install_command('vision')}"
        )
    return None


def torch_version() -> str:
    """Return the version of the installed torch, which is a dependency."""
    return importlib.metadata.version("torch")


@functools.cache  # reading the metadata of all packages takes long
def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution; None: it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
