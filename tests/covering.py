"""Covering arrays: few cases in which every possible pair of values stands at least once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any


def pairs(case: Any) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    """Return the pairs of a case's values, each value with the number of its field."""
    return set(combinations(enumerate(case), 2))


def covering(cases: Sequence[Any], found: Callable[[Any], set[Any]] = pairs) -> Iterator[Any]:
    """Take the case with the most pairs (or what ``found`` returns) that no earlier case has, until all have one."""
    of_cases = {case: found(case) for case in cases}
    missing = set().union(*of_cases.values())
    while missing:
        best = max(cases, key=lambda case: len(of_cases[case] & missing))
        missing -= of_cases[best]
        yield best
