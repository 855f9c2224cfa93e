"""The nearest valid word for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6  # difflib's ratio: `lr` finds nothing, `learning_rat` finds `learning_rate`


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The word of ``valid`` that looks most like ``word``, or None if nothing looks like it."""
    matches = difflib.get_close_matches(word, list(valid), n=1, cutoff=_CUTOFF)
    return matches[0] if matches else None


def hint(word: str, valid: Iterable[str]) -> str:
    """What to write instead of ``word``: the nearest of ``valid``, or all of them if none is near."""
    words = sorted(valid)
    match = nearest(word, words)
    if match is not None:
        return f"did you mean `{match}`?"
    return f"choose from {', '.join(words)}" if words else "nothing is valid here"
