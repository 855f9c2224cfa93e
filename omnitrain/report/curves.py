"""Take curves over steps out of the metrics of runs, with no more points than a reader can see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnitrain.report.run_record import Line

Points = list[tuple[int, float | None]]  # step, value; None is a gap


@dataclass(frozen=True)
class Curve:
    """A number of a run over its steps.

    Attributes:
        run: index of the run in the report.
        name: name of the number, the same in all runs.
        points: step and value; None where a line of metrics lacks it. At least one value.
    """

    run: int
    name: str
    points: Points

    @property
    def values(self) -> list[float]:
        """All values, without the gaps."""
        return [value for _, value in self.points if value is not None]


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line of metrics with their paths, such as ``heads/text/loss``."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


class Metrics:
    """The numbers of all lines of several runs, by path. A path that was taken is not among the others.

    Args:
        lines: of each run, in the order of the report, its lines, which have ``step``.
    """

    def __init__(self, lines: Sequence[Sequence[Line]]) -> None:
        self._rows = [[(line["step"], dict(flat(line))) for line in of_run] for of_run in lines]
        self._left = dict.fromkeys(path for rows in self._rows for _, row in rows for path in row if path != "step")

    def take(self, names: Mapping[str, str]) -> list[Curve]:
        """Return the curves of paths; ``names``: path -> name. Runs without a path have no curve."""
        for path in names:
            self._left.pop(path, None)
        curves = [
            Curve(run, name, [(step, row.get(path)) for step, row in rows])
            for path, name in names.items()
            for run, rows in enumerate(self._rows)
        ]
        return [curve for curve in curves if curve.values]

    def drop(self, start: str) -> None:
        """Take all paths that begin with ``start``, for something that draws no curve of them."""
        self._left = {path: None for path in self._left if not path.startswith(start)}

    def matching(self, start: str, end: str = "") -> dict[str, str]:
        """Return path -> what is between ``start`` and ``end``, for paths that nobody took."""
        return {
            path: path[len(start) : len(path) - len(end)]
            for path in self._left
            if path.startswith(start) and path.endswith(end) and len(path) > len(start) + len(end)
        }

    def others(self) -> list[str]:
        """Return the paths that nobody took."""
        return list(self._left)


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


def is_wide(curves: Sequence[Curve]) -> bool:
    """Return whether values spread so far that only a logarithmic axis shows all of them."""
    values = [value for curve in curves for value in curve.values]
    return min(values) > 0 and math.log10(max(values) / min(values)) > 2
