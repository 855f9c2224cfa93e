"""Send functions of a notebook, a prompt or standard input to other processes, which cannot import them."""

from __future__ import annotations

import contextlib
import dis
import importlib
import io
import linecache
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import dill


def pickled(value: Any) -> bytes:
    """Pickle a value for ``pickle.loads`` in another process; pickle ``__main__`` by value if it has no file."""
    if _main_has_file():
        return pickle.dumps(value)
    stream = io.BytesIO()
    _CellPickler(stream, recurse=False).dump(value)
    return stream.getvalue()


class _CellPickler(dill.Pickler):
    """Pickles functions of cells with the globals that they read, and modules by their name.

    dill alone pickles all variables of the notebook with each function (or none of two functions that call each other),
    and the contents of modules that are not in ``site-packages``, such as your own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._copies: dict[int, tuple[FunctionType, FunctionType]] = {}  # by id; each function with its copy

    def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(obj, FunctionType) and obj.__module__ == "__main__":
            if id(obj) not in self._copies:
                copy = _with_read_globals(obj)
                self._copies[id(obj)] = self._copies[id(copy)] = (obj, copy)
            obj = self._copies[id(obj)][1]
        if isinstance(obj, ModuleType) and obj.__name__ != "__main__" and id(obj) not in self.memo:
            self.save_reduce(importlib.import_module, (obj.__name__,), obj=obj)
            return
        super().save(obj, *args, **kwargs)


def _with_read_globals(function: FunctionType) -> FunctionType:
    """Return a copy of a function whose globals are those that its code reads."""
    known = function.__globals__
    read = {name: known[name] for name in _globals_read_by(function.__code__) if name in known}
    own = {"__name__": "__main__", **read}
    copy = FunctionType(function.__code__, own, None, function.__defaults__, function.__closure__)
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__", "__kwdefaults__"):
        setattr(copy, name, getattr(function, name))
    copy.__dict__.update(function.__dict__)
    return copy


def _globals_read_by(code: CodeType) -> set[str]:
    own = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_globals_read_by(part) for part in code.co_consts if isinstance(part, CodeType)))


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
