"""Keep the half a million objects of imports and models out of garbage collections."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection; do nothing if the imports are excluded already."""
    if all(found is not sys.modules for found in gc.get_objects()):  # gc.get_freeze_count takes 50 ms
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
