"""Send functions of a notebook, a prompt or standard input to other processes, which cannot import them."""

from __future__ import annotations

import contextlib
import linecache
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dill


def pickled(value: Any) -> bytes:
    """Pickle a value for ``pickle.loads`` in another process; pickle ``__main__`` by value if it has no file.

    Args:
        value: for example a function with its arguments.

    Raises:
        Exception: the value cannot be pickled; the type depends on the object.
    """
    return pickle.dumps(value) if _main_has_file() else dill.dumps(value, recurse=True)


@contextlib.contextmanager
def main_without_file() -> Iterator[None]:
    """Keep processes started in this context from running the file of ``__main__`` if it is no file (``<stdin>``)."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or _main_has_file():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def lines_of_cells() -> dict[str, list[str]]:
    """Return name -> lines of code that is in no file, such as the cells of a notebook, for tracebacks elsewhere."""
    return {
        name: list(entry[2])
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not Path(name).is_file()
    }


def _main_has_file() -> bool:
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return main.__spec__ is not None or (file is not None and Path(file).is_file())
