"""The error that a user sees if a function failed on some ranks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omnitrain.parallel.spawn.worker import Done, Failed


class RankError(RuntimeError):
    """A function failed on a rank. The message lists ranks, errors and stacks.

    ``__cause__`` is the exception of the rank that failed first, if it can be pickled.

    Attributes:
        ranks: the ranks that died, raised or did not return in time. The rank that failed first comes first.
        tracebacks: rank -> traceback of what it raised.
        output: what each rank printed, if :func:`launch` started them.
    """

    def __init__(self, message: str, ranks: Sequence[int], tracebacks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.tracebacks = dict(tracebacks or {})
        self.output: tuple[str, ...] = ()


@dataclass(frozen=True)
class Died:
    """The rank's process ended."""

    exit_code: int | None


@dataclass(frozen=True)
class Late:
    """The rank did not return in time.

    Attributes:
        stack: its stack in the function; None: it did not answer.
    """

    stack: str | None


Report = Done | Failed | Died | Late


def failure(name: str, timeout_s: float, reports: Mapping[int, Report]) -> RankError | None:
    """Return the error that describes all failures of the function ``name``; None if every rank returned."""
    died = {rank: report for rank, report in sorted(reports.items()) if isinstance(report, Died)}
    failed = {rank: report for rank, report in reports.items() if isinstance(report, Failed)}
    failed = dict(sorted(failed.items(), key=lambda item: item[1].at))
    late = {rank: report for rank, report in sorted(reports.items()) if isinstance(report, Late)}
    ranks = [*died, *failed, *late]
    if not ranks:
        return None
    end = "was still running" if died or failed else f"did not return within {timeout_s:g} s"
    lines = [f"{name} failed on {len(ranks)} of {len(reports)} ranks"]
    lines += [f"  rank {rank} died with exit code {report.exit_code}" for rank, report in died.items()]
    lines += [f"  rank {rank} raised {report.summary}" for rank, report in failed.items()]
    lines += [f"  rank {rank} {end}" for rank in late]
    lines += [f"  rank {rank} returned" for rank, report in sorted(reports.items()) if isinstance(report, Done)]
    if failed and not died:  # if a rank died, the errors of the others are only consequences
        rank, report = next(iter(failed.items()))
        lines += [f"rank {rank} raised:", report.traceback]
    lines += _stacks(late)
    error = RankError("\n".join(lines), ranks, {rank: report.traceback for rank, report in failed.items()})
    first = reports[ranks[0]]
    if isinstance(first, Failed) and first.error is not None:
        error.__cause__ = pickle.loads(first.error)
    return error


def _stacks(late: Mapping[int, Late]) -> list[str]:
    """The stacks of the ranks that are late; ranks with the same stack are grouped."""
    ranks_at: dict[str | None, list[int]] = {}
    for rank, report in late.items():
        ranks_at.setdefault(report.stack, []).append(rank)
    lines = []
    for stack, ranks in ranks_at.items():
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        lines += [f"{names} did not report a stack" if stack is None else f"{names} last seen at:\n{stack}"]
    return lines
