"""Covering arrays: few cases in which every possible pair of values stands at least once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

PRECISIONS = ("", "bf16", "bf16_param")
"""Words of layouts: fp32, bf16 computed with fp32 weights, bf16 weights."""


def pairs(case: Any) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    """Return the pairs of a case's values, each value with the number of its field."""
    return set(combinations(enumerate(case), 2))


def pairs_in_fp32(case: Any) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    """Return the pairs of a case whose last value is a precision; in bf16, where less shows, only those with it."""
    return {pair for pair in pairs(case) if not case[-1] or pair[1][0] == len(case) - 1}


def covering(cases: Sequence[Any], found: Callable[[Any], set[Any]] = pairs) -> Iterator[Any]:
    """Take the case with the most pairs (or what ``found`` returns) that no earlier case has, until all have one."""
    of_cases = {case: found(case) for case in cases}
    missing = set().union(*of_cases.values())
    while missing:
        best = max(cases, key=lambda case: len(of_cases[case] & missing))
        missing -= of_cases[best]
        yield best
