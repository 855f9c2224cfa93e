"""The nearest valid word for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6  # difflib's ratio: `lr` finds nothing, `learning_rat` finds `learning_rate`


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The word of ``valid`` that looks most like ``word``, or None if nothing looks like it."""
    matches = difflib.get_close_matches(word, list(valid), n=8, cutoff=_CUTOFF)
    # Of equally near words, one with the same beginning: `epp` is `ep`, not `pp`.
    return max(matches, key=lambda match: (_likeness(word, match), match[:1] == word[:1]), default=None)


def _likeness(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, word).ratio()


def hint(word: str, valid: Iterable[str]) -> str:
    """What to write instead of ``word``: the nearest of ``valid``, or all of them if none is near."""
    words = sorted(valid)
    match = nearest(word, words)
    if match is not None:
        return f"did you mean `{match}`?"
    return f"choose from {', '.join(words)}" if words else "nothing is valid here"
