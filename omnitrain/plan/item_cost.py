"""The cost of encoding an item, from the seconds that an encoder took."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np


class Encoded(NamedTuple):
    """What an encoder computed on a rank in a step, and how long that took."""

    calls: float  # number of calls
    elements: float  # sum of the items' numbers of input elements
    squares: float  # sum of the squares of these numbers
    seconds: float  # of all calls


def item_cost(elements: int, quadratic: float) -> int:
    """Return the cost of an item, with attention inside of it: ``elements + quadratic * elements ** 2``, rounded."""
    return elements + round(quadratic * elements**2)


def fitted_quadratic(encoded: list[Encoded]) -> float:
    """Return ``b / a`` of the least squares fit ``seconds = a * elements + b * squares + c * calls``, none negative.

    It is 0 where the items, of several steps and all ranks, do not show a quadratic part: if all have one size, say.
    """
    rows = np.array([row for row in encoded if row.elements], dtype=np.float64)
    if len(rows) < 2:
        return 0.0
    scale = rows.max(axis=0)
    scale[scale == 0] = 1
    calls, elements, squares, seconds = (rows / scale).T
    columns = {"elements": elements, "squares": squares, "calls": calls}
    best, found = np.inf, 0.0
    for others in (chosen for size in range(3) for chosen in combinations(("squares", "calls"), size)):
        names = ("elements", *others)
        fit, _, rank, _ = np.linalg.lstsq(np.stack([columns[name] for name in names], axis=1), seconds, rcond=1e-6)
        error = float(np.square(sum(f * columns[n] for f, n in zip(fit, names, strict=True)) - seconds).sum())
        # The simplest fit among equally good ones.
        if rank == len(names) and fit[0] > 0 and (fit >= 0).all() and error < best * (1 - 1e-9) - 1e-15:
            quadratic = dict(zip(names, fit.tolist(), strict=True)).get("squares", 0.0)
            best, found = error, quadratic / fit[0] * scale[1] / scale[2]
    return float(found)
