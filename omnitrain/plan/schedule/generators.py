"""Make the forwards and backwards of a pipeline schedule, by name.

``p`` ranks, ``v`` stages on each rank (its chunks), ``m`` micro-batches; ``F`` and ``B`` are the times of a rank's
forward and backward of one micro-batch over all its chunks. With equal stages and free communication:

    gpipe, 1f1b     m (F + B) + (p - 1) (F + B)
    interleaved     m (F + B) + (p - 1) (F + B) / v     if m is a multiple of p
    zbv             m (F + B)                           from a rank's first to its last action, if F = I = W and
                                                        m is at least 2 p - 1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import Action, Kind, Schedule

KINDS = ("gpipe", "1f1b", "interleaved", "zbv")


def stage_of(rank: int, chunk: int, num_ranks: int, *, is_v: bool = False) -> int:
    """Return the stage that is chunk ``chunk`` of a rank.

    Stages go round the ranks: with 4 ranks, rank 0 has stages 0, 4, 8, ... In a V, every second round goes back, so
    that adjacent stages 3 and 4 are on one rank: rank 0 has stages 0, 7, 8, ...
    """
    return chunk * num_ranks + (num_ranks - 1 - rank if is_v and chunk % 2 else rank)


def stage_ranks(num_ranks: int, num_chunks: int, *, is_v: bool = False) -> tuple[int, ...]:
    """Return the rank of each of ``num_ranks * num_chunks`` stages: the inverse of :func:`stage_of`."""
    ranks = {stage_of(r, c, num_ranks, is_v=is_v): r for r in range(num_ranks) for c in range(num_chunks)}
    return tuple(ranks[stage] for stage in range(len(ranks)))


def accumulate(num_micro_batches: int, *, overlap: bool = False) -> Schedule:
    """Gradient accumulation on one stage: each forward, then its backward; ``overlap``: see :func:`one_f_one_b`."""
    return one_f_one_b(1, num_micro_batches, overlap=overlap)


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019). All activations are kept."""
    return one_f_one_b(num_ranks, num_micro_batches, extra_warm_up=num_micro_batches)


def one_f_one_b(num_ranks: int, num_micro_batches: int, *, extra_warm_up: int = 0, overlap: bool = False) -> Schedule:
    """One forward, one backward in turn (Narayanan et al. 2019). Rank r keeps at most p - r activations.

    ``extra_warm_up``: forwards that each rank does more than needed before its first backward. ``overlap``: whether a
    forward and the backward that follows it are one ``OVERLAP_F_B``. The two must not need each other, and a result
    leaves at the end of its pair. So each rank does ``2 (p - r - 1) + 1`` forwards before its first pair, as in
    interleaved 1F1B, and rank r keeps at most 2 (p - r) activations.
    """
    warm_ups = [(1 + overlap) * (num_ranks - rank - 1) + extra_warm_up for rank in range(num_ranks)]
    return _alternating(num_ranks, 1, num_micro_batches, num_micro_batches, warm_ups, overlap)


def interleaved(
    num_ranks: int,
    num_chunks: int,
    num_micro_batches: int,
    *,
    group_size: int | None = None,
    extra_warm_up: int = 0,
    overlap: bool = False,
) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021): each rank has several stages and runs groups of micro-batches in turn.

    ``group_size``: least number of micro-batches, by default and at least ``num_ranks``, that a rank runs through one
    stage before it goes on to its next one; groups are as equal as possible. Others: see :func:`one_f_one_b`; with
    ``overlap`` each rank does one more forward before its first backward.
    """
    if group_size is not None and group_size < num_ranks:
        raise ScheduleError(
            f"a group of {group_size} micro-batches does not fill a pipeline of {num_ranks} ranks; "
            f"set the group size to {num_ranks} or more"
        )
    least = group_size or num_ranks
    largest = -(-num_micro_batches // max(1, num_micro_batches // max(1, least)))
    others = (num_chunks - 1) * largest + extra_warm_up
    warm_ups = [2 * (num_ranks - rank - 1) + others for rank in range(num_ranks)]
    return _alternating(num_ranks, num_chunks, num_micro_batches, least, warm_ups, overlap)


def _alternating(p: int, v: int, m: int, group_size: int, warm_ups: Sequence[int], overlap: bool) -> Schedule:
    """``warm_ups[rank]`` forwards, a forward and a backward in turn or as one action, then the other backwards.

    Micro-batches run in groups of at least ``group_size``, if there are as many, the larger groups first.
    """
    _require_positive(p, v, m)
    num_groups = max(1, m // group_size)
    size, larger = divmod(m, num_groups)
    starts = [group * size + min(group, larger) for group in range(num_groups + 1)]
    order = [(chunk, k) for start, stop in pairwise(starts) for chunk in range(v) for k in range(start, stop)]
    rows = []
    for rank, warm_up in enumerate(warm_ups):
        stages = [stage_of(rank, chunk, p) for chunk in range(v)]
        forwards = [Action(Kind.F, stages[chunk], k) for chunk, k in order]
        backwards = [Action(Kind.B, stages[-1 - chunk], k) for chunk, k in order]
        first = min(warm_up + overlap, len(forwards))
        pairs = list(zip(forwards[first:], backwards, strict=False))
        steady = (
            [Action(Kind.OVERLAP_F_B, parts=pair) for pair in pairs] if overlap else [a for pair in pairs for a in pair]
        )
        rows.append([*forwards[:first], *steady, *backwards[len(pairs) :]])
    return _schedule(rows, stage_ranks(p, v), m)


def zbv(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Zero bubble on a V (Qi et al. 2023, arXiv 2401.10241, section 6): two stages on each rank, backward in I and W.

    If F, I and W of a stage take equally long and there are at least 2 p - 1 micro-batches, no rank is idle between its
    first and its last action. Rank 0 starts first and ends first, so a step in which all ranks wait for each other
    before the update takes (p - 1) F longer, F of one stage. A rank keeps at most 2 p activations of half a rank's
    blocks, as much memory as 1F1B on rank 0.
    """
    _require_positive(num_ranks, 2, num_micro_batches)
    rows = (
        [step for step in _zbv_row(rank, num_ranks, num_micro_batches) if (step.micro_batch or 0) < num_micro_batches]
        for rank in range(num_ranks)
    )
    return _schedule(rows, stage_ranks(num_ranks, 2, is_v=True), num_micro_batches)


def generate(
    kind: str,
    num_ranks: int,
    num_micro_batches: int,
    *,
    num_chunks: int | None = None,
    group_size: int | None = None,
    overlap: bool = False,
    extra_forwards: int = 0,
) -> Schedule:
    """Return a schedule by its name in a recipe: ``gpipe``, ``1f1b``, ``interleaved`` or ``zbv``.

    ``num_chunks``: number of stages on each rank; None: 2 for ``interleaved`` and ``zbv``, else 1. ``extra_forwards``:
    the extra warm-up of :func:`one_f_one_b`. See :func:`interleaved`. Raises ScheduleError: no such kind, or it does
    not allow the chunks, the group size, the overlap or extra forwards.
    """
    if kind not in KINDS:
        raise ScheduleError(f"there is no pipeline schedule '{kind}'; there are {', '.join(KINDS)}")
    if (overlap or extra_forwards) and kind in ("gpipe", "zbv"):
        raise ScheduleError(f"{kind} does not run a forward and a backward in turn; use 1f1b or interleaved")
    more: dict[str, Any] = {"overlap": overlap, "extra_warm_up": extra_forwards}
    least = 2 if kind in ("interleaved", "zbv") else 1
    chunks = num_chunks or least
    if kind == "interleaved":
        if chunks < least:
            raise ScheduleError(f"interleaved needs at least 2 stages on each rank, not {chunks}; for 1 use 1f1b")
        return interleaved(num_ranks, chunks, num_micro_batches, group_size=group_size, **more)
    if group_size is not None:
        raise ScheduleError(f"{kind} has no groups of micro-batches; leave out the group size or use interleaved")
    if chunks != least:
        stages, others = f"{least} stage{'s' * (least > 1)}", "" if kind == "zbv" else "; for more use interleaved"
        raise ScheduleError(f"{kind} has {stages} on each rank, not {chunks}{others}")
    if kind == "1f1b":
        return one_f_one_b(num_ranks, num_micro_batches, **more)
    return (gpipe if kind == "gpipe" else zbv)(num_ranks, num_micro_batches)


def least_micro_batches(kind: str, num_ranks: int, group_size: int | None = None) -> int:
    """Return the number of micro-batches below which ``kind`` runs, but has more idle time than its formula says."""
    return {"gpipe": 1, "1f1b": num_ranks, "interleaved": group_size or num_ranks, "zbv": 2 * num_ranks - 1}[kind]


def _schedule(rows: Iterable[list[Action]], ranks: tuple[int, ...], m: int) -> Schedule:
    return Schedule(tuple(map(tuple, rows)), ranks, m)


def _require_positive(num_ranks: int, num_chunks: int, num_micro_batches: int) -> None:
    numbers = {"pipeline ranks": num_ranks, "stages on a rank": num_chunks, "micro-batches": num_micro_batches}
    for noun, number in numbers.items():
        if number < 1:
            raise ScheduleError(f"a schedule needs at least 1 of its {noun}, not {number}")


def _zbv_row(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    """Yield a rank's actions for at least 2 p - 1 micro-batches. Micro-batches that do not exist are to be left out."""
    m = max(2 * num_ranks - 1, num_micro_batches)
    stages = [stage_of(rank, chunk, num_ranks, is_v=True) for chunk in (0, 1)]
    after = num_ranks - rank
    done = {(kind, chunk): 0 for kind in "FIW" for chunk in (0, 1)}

    def run(kinds: str, chunk: int) -> Iterator[Action]:
        for kind in kinds:
            yield Action(Kind(kind), stages[chunk], done[kind, chunk])
            done[kind, chunk] += 1

    for _ in range(2 * after - 1):  # warm-up
        yield from run("F", 0)
    for _ in range(rank):
        yield from run("F", 1)
        yield from run("F", 0)
    for _ in range(after):
        yield from run("FIW", 1)
    while done["F", 1] < m:  # steady state
        if done["F", 0] < m:
            yield from run("F", 0)
        yield from run("IW", 0)
        yield from run("FIW", 1)
    for _ in range(rank):  # drain
        yield from run("I", 0)
        yield from run("I", 1)
    for _ in range(after):
        yield from run("IW", 0)
    while done["W", 1] < m:
        yield from run("W", 1)
    while done["W", 0] < m:
        yield from run("W", 0)
