"""A failure of a model's own code is a fact about the model; one of ours, or of the machine, is none."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from omnitrain.errors import ModelError, UserError

_OURS = Path(__file__).parents[2]
# What no model can bring about in our own lines. Others (a missing attribute, an odd shape) may be an output's fault.
_BUGS = (NameError, AssertionError)
_MACHINE = (MemoryError, torch.OutOfMemoryError)


def raise_if_ours(error: Exception) -> None:
    """Let ``error``, caught around code of a model, pass only if it may say something about the model.

    Raises:
        Exception: ``error`` itself, where memory ran out, or a name or an assertion of omnitrain's own is wrong.
    """
    if isinstance(error, _MACHINE) or (isinstance(error, _BUGS) and _OURS in Path(_origin(error)[0]).parents):
        raise error


def failure_of_model(error: Exception) -> str:
    """What a model's code said when it failed, and where, in one line.

    Raises:
        Exception: see :func:`raise_if_ours`.
    """
    raise_if_ours(error)
    file, line = _origin(error)
    message = next(iter(str(error).splitlines()), "")[:200]
    return f"{type(error).__name__}: {message} ({Path(file).name}:{line})"


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """What a model's own code raises in here becomes a refusal that begins with ``what``.

    Raises:
        ModelError: the code raised something.
        Exception: see :func:`raise_if_ours`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # foreign code raises anything
        raise ModelError(f"{what}: {failure_of_model(error)}") from error


def _origin(error: Exception) -> tuple[str, int]:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename, last.lineno or 0
