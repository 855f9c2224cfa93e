"""Tell exceptions of a model's code, which are facts about the model, from exceptions of omnitrain and the machine."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from omnitrain.errors import ModelError, UserError

_OURS = Path(__file__).parents[2]
# In omnitrain's code these are bugs. Other errors in it (a missing attribute, a wrong shape) may come from the model.
_BUGS = (NameError, AssertionError)
_MACHINE = (MemoryError, torch.OutOfMemoryError)


def raise_if_ours(error: Exception) -> None:
    """Raise ``error`` again if memory ran out, or it is a name or assertion error in omnitrain's code."""
    if isinstance(error, _MACHINE) or (isinstance(error, _BUGS) and _OURS in Path(_origin(error)[0]).parents):
        raise error


def failure_of_model(error: Exception) -> str:
    """Describe an exception of a model's code in one line, with its place; raise others (:func:`raise_if_ours`)."""
    raise_if_ours(error)
    file, line = _origin(error)
    message = next(iter(str(error).splitlines()), "")[:200]
    return f"{type(error).__name__}: {message} ({Path(file).name}:{line})"


@contextmanager
def suppress_errors_of_models() -> Iterator[None]:
    """End the context at an exception of a model's code; others are raised, see :func:`raise_if_ours`."""
    try:
        yield
    except Exception as error:  # the model's code may raise anything
        raise_if_ours(error)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn exceptions of a model's code into a :class:`ModelError` whose message begins with ``what``; raise others."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the model's code may raise anything
        raise ModelError(f"{what}: {failure_of_model(error)}") from error


def _origin(error: Exception) -> tuple[str, int]:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename, last.lineno or 0
