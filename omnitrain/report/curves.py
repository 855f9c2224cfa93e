"""Take curves over steps out of the metrics of runs, with no more points than a reader can see."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]  # of metrics
Points = list[tuple[int, float | None]]  # step, value; None is a gap


@dataclass(frozen=True)
class Curve:
    """A number of a run over its steps, of the same name in all runs; its points have at least one value.

    ``run`` is the index of the run in the report.
    """

    run: int
    name: str
    points: Points

    @property
    def values(self) -> list[float]:
        """All values, without the gaps."""
        return [value for _, value in self.points if value is not None]


def styles(curves: Sequence[Curve]) -> list[tuple[int, int]]:
    """Return colour and dashes of each curve: names differ in colour, runs in dashes (of one name, in colour)."""
    places = {name: index for index, name in enumerate(dict.fromkeys(curve.name for curve in curves))}
    if len(places) == 1:
        return [(curve.run % 10, curve.run // 10) for curve in curves]
    return [(places[curve.name] % 10, curve.run + places[curve.name] // 10) for curve in curves]


def numbers_in(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line of metrics with their paths, such as ``heads/text/loss``."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


class Metrics:
    """The numbers of all lines of metrics of several runs, by path. Each can be taken once."""

    def __init__(self, lines: Sequence[Sequence[Line]]) -> None:
        self._rows = [[(line["step"], dict(numbers_in(line))) for line in of_run] for of_run in lines]
        self._left = dict.fromkeys(path for rows in self._rows for _, row in rows for path in row if path != "step")

    def take(self, *patterns: str) -> dict[str, list[Curve]]:
        """Return figure -> curves of the paths that match one of these expressions and were not taken yet.

        A group ``figure`` of the expression divides the paths into figures; without it, there is one, ``""``. A group
        ``name`` names the curve; without it, or where it is empty, its path does. Runs without a path have no curve.
        """
        figures: dict[str, list[Curve]] = {}
        for pattern in patterns:
            for path in [*self._left]:
                if (found := re.fullmatch(pattern, path)) is None:
                    continue
                del self._left[path]
                groups = found.groupdict()
                curves = [
                    Curve(run, groups.get("name") or path, [(step, row.get(path)) for step, row in rows])
                    for run, rows in enumerate(self._rows)
                ]
                figures.setdefault(groups.get("figure") or "", []).extend(c for c in curves if c.values)
        return {name: curves for name, curves in figures.items() if curves}


def thinned(points: Points, most: int) -> Points:
    """Return at most ``most`` of the points: of each stretch of steps the lowest and the highest one.

    A peak of a single step stays, unlike with a mean or with every n-th point. Gaps stay where a stretch has no value.
    """
    if len(points) <= most:
        return points
    buckets = max(most // 2, 1)
    kept: Points = []
    for bucket in range(buckets):
        part = points[bucket * len(points) // buckets : (bucket + 1) * len(points) // buckets]
        known = [(value, step) for step, value in part if value is not None]
        if not known:
            kept.append((part[0][0], None))
            continue
        ends = {min(known)[1]: min(known)[0], max(known)[1]: max(known)[0]}
        kept += sorted(ends.items())
    return kept
