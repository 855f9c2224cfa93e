"""The machine: versions of packages, what ``omnitrain doctor`` finds, and what its GPU does per second at best."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpu.pack_wheels import NAMES

PACKAGES = ("torch", "triton", "flash-attn", "numpy", "tokenizers", "huggingface-hub", "safetensors", *NAMES)


def run(tiny: bool, folder: Path) -> Iterator[tuple[str, float | str]]:
    """Yield versions first: without some of the packages, nothing else can be imported."""
    for name in PACKAGES:
        yield f"version {name}", version_of(name)
    from omnitrain.report.doctor import examine

    for finding in examine():
        mark = {True: "", False: "PROBLEM: ", None: "(optional) "}[finding.ok]
        yield f"doctor {finding.section} {finding.name}", f"{mark}{finding.found}"
    from gpu.rates import rates

    yield from rates(tiny)


def version_of(name: str) -> str:
    """Return the version of an installed package, or that it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
