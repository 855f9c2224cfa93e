"""What a notebook, a prompt or a program from standard input defines, in other processes: no file there has it."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dill


def pickled(value: Any) -> bytes:
    """For ``pickle.loads`` in another process; what ``__main__`` defines goes by value where that has no file.

    Args:
        value: such as a function with its arguments.

    Raises:
        Exception: each kind of object refuses in its own way.
    """
    return pickle.dumps(value) if _main_has_file() else dill.dumps(value, recurse=True)


@contextlib.contextmanager
def main_without_file() -> Iterator[None]:
    """Processes that are started here do not run the file of ``__main__`` where there is none, as for ``<stdin>``."""
    main = sys.modules["__main__"]
    named = getattr(main, "__file__", None)
    if named is None or _main_has_file():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = named


def _main_has_file() -> bool:
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return main.__spec__ is not None or (file is not None and Path(file).is_file())
