"""Choose among the implementations of an operation: by name, or ``auto``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from omnitrain.errors import UserError
from omnitrain.packages import install_command


def _on_every_device(device: torch.device) -> None:
    """Nothing is missing."""


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation."""

    name: str  # name in recipes
    run: Callable[..., Any]  # the implementation
    # device -> missing requirement; None: nothing is missing
    missing: Callable[[torch.device], str | None] = _on_every_device
    # device types on which ``auto`` may choose it if nothing is missing; None: any
    automatic: tuple[str, ...] | None = None


B = TypeVar("B", bound=Backend)


def choose(operation: str, backends: Sequence[B], wanted: str, device: torch.device) -> B:
    """Return the backend ``wanted``, or the first automatic one on ``device``; a UserError names those that can run."""
    if wanted == "auto":
        automatic = (b for b in backends if b.automatic is None or device.type in b.automatic)
        return next(b for b in automatic if b.missing(device) is None)
    named = next((backend for backend in backends if backend.name == wanted), None)
    if named is None:
        names = ", ".join(backend.name for backend in backends)
        raise UserError(f"{operation}: no backend {wanted!r}; expected auto, {names}")
    lack = named.missing(device)
    if lack is not None:
        able = ", ".join(["auto", *(backend.name for backend in backends if backend.missing(device) is None)])
        raise UserError(f"{operation}: backend {wanted!r} {lack}; choose from {able}")
    return named


def liger_missing(device: torch.device) -> str | None:
    """Return the missing requirement of liger's kernels on ``device``; None: nothing is missing."""
    if device.type != "cuda":
        return f"runs only on CUDA, not on {device.type}"
    if importlib.util.find_spec("liger_kernel") is None:
        return f"needs the package liger-kernel ({install_command('liger')})"
    return None
