"""The error that a user sees if a function failed on some ranks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence

from omnitrain.parallel.spawn.worker import PoolMessage


class RankError(RuntimeError):
    """A function failed on ``ranks``, the first to fail first. The message lists ranks, errors and stacks.

    ``__cause__`` is the exception of that rank, if it can be pickled; ``tracebacks`` and, of :func:`launch`, ``output``
    are by rank.
    """

    def __init__(self, message: str, ranks: Sequence[int], tracebacks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.tracebacks = dict(tracebacks or {})
        self.output: tuple[str, ...] = ()


def failure(name: str, timeout_s: float, reports: Mapping[int, PoolMessage]) -> RankError | None:
    """Return the error that describes all failures of the function ``name``; None if every rank returned."""
    of_kind: dict[str, dict[int, PoolMessage]] = {"died": {}, "failed": {}, "late": {}, "done": {}}
    for rank, report in sorted(reports.items()):
        of_kind[report.kind][rank] = report
    died, late, done = of_kind["died"], of_kind["late"], of_kind["done"]
    failed = dict(sorted(((rank, report.value) for rank, report in of_kind["failed"].items()), key=lambda i: i[1].at))
    ranks = [*died, *failed, *late]
    if not ranks:
        return None
    end = "was still running" if died or failed else f"did not return within {timeout_s:g} s"
    lines = [f"{name} failed on {len(ranks)} of {len(reports)} ranks"]
    lines += [f"  rank {rank} died with exit code {report.value}" for rank, report in died.items()]
    lines += [f"  rank {rank} raised {error.summary}" for rank, error in failed.items()]
    lines += [f"  rank {rank} {end}" for rank in late]
    lines += [f"  rank {rank} returned" for rank in done]
    if failed and not died:  # if a rank died, the errors of the others are only consequences
        first = next(iter(failed))
        lines += [f"rank {first} raised:", failed[first].traceback]
    lines += _stacks(late)
    error = RankError("\n".join(lines), ranks, {rank: raised.traceback for rank, raised in failed.items()})
    if ranks[0] in failed and failed[ranks[0]].error is not None:
        error.__cause__ = pickle.loads(failed[ranks[0]].error)
    return error


def _stacks(late: Mapping[int, PoolMessage]) -> list[str]:
    """The stacks of the ranks that are late; ranks with the same stack are grouped."""
    ranks_at: dict[str | None, list[int]] = {}
    for rank, report in late.items():
        ranks_at.setdefault(report.value, []).append(rank)
    lines = []
    for stack, ranks in ranks_at.items():
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        lines += [f"{names} did not report a stack" if stack is None else f"{names} last seen at:\n{stack}"]
    return lines
