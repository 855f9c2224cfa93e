"""Suggest the nearest valid word for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6  # ratio of difflib: `lr` has no match, `learning_rat` matches `learning_rate`


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the word of ``valid`` that is most similar to ``word``, or None if none is similar."""
    matches = difflib.get_close_matches(word, list(valid), n=8, cutoff=_CUTOFF)
    # Among equally similar words, prefer one with the same first letter: `epp` is `ep`, not `pp`.
    return max(
        matches,
        key=lambda match: (difflib.SequenceMatcher(None, match, word).ratio(), match[:1] == word[:1]),
        default=None,
    )


def hint(word: str, valid: Iterable[str]) -> str:
    """Return advice on what to write instead of ``word``: the nearest valid word, or all of them if none is near."""
    words = sorted(valid)
    match = nearest(word, words)
    if match is not None:
        return f"did you mean `{match}`?"
    return f"choose from {', '.join(words)}" if words else "nothing is valid here"
