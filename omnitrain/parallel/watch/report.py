"""Who is behind in a run that stands still, and what a user reads of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Phase = Literal["data", "encode", "forward", "backward", "optimizer", "save", "evaluate"]

_ORDER: dict[str | None, int] = {
    phase: number
    for number, phase in enumerate((None, "data", "encode", "forward", "backward", "optimizer", "save", "evaluate"))
}
_MANY_SAMPLES = 8


class Place(NamedTuple):
    """Where a rank is. None: not within one.

    Attributes:
        step: the optimizer step, from 1.
        micro_batch: of the step, from 0.
        phase: of the step.
        component: that runs, or whose backward does.
        samples: ids of the micro-batch.
    """

    step: int | None = None
    micro_batch: int | None = None
    phase: Phase | None = None
    component: str | None = None
    samples: Sequence[str] = ()


class Collectives(NamedTuple):
    """What a rank has begun on a process group: of all its ranks the same, or somebody waits.

    Attributes:
        group: what the group is for.
        begun: so many collectives.
    """

    group: str
    begun: int


@dataclass(frozen=True)
class Answer:
    """What a rank tells of itself.

    Attributes:
        place: where it is.
        seconds: for how long.
        collectives: by group and device.
        stack: of its main thread.
    """

    place: Place
    seconds: float
    collectives: Mapping[str, Collectives]
    stack: str


def behind(answers: Mapping[int, Answer], silent: Iterable[int] = ()) -> list[int]:
    """The ranks that the others wait for.

    Args:
        answers: of the ranks that tell where they are.
        silent: ranks whose process is gone, or cannot run Python; if there are any, it is them.

    Returns:
        Else those that have begun fewer collectives than another rank of a group, and wait in none themselves. Where
        collectives tell nothing, those with the least progress in the step; all, where they are alike.
    """
    if silent := sorted(silent):
        return silent
    late: set[int] = set()
    waiting: set[int] = set()
    for key in {key for answer in answers.values() for key in answer.collectives}:
        counts = {rank: answer.collectives[key].begun for rank, answer in answers.items() if key in answer.collectives}
        least, most = min(counts.values()), max(counts.values())
        if least < most:
            late |= {rank for rank, count in counts.items() if count < most}
            waiting |= {rank for rank, count in counts.items() if count > least}
    if late:
        return sorted(late - waiting or late)
    progress = {rank: _progress(answer.place) for rank, answer in answers.items()}
    return sorted(rank for rank, done in progress.items() if done == min(progress.values()))


def _progress(place: Place) -> tuple[int, float, int]:
    """Comparable: the data come before all micro-batches of a step, what has no micro-batch else after them."""
    phase = _ORDER[place.phase]
    outside = -1 if phase <= _ORDER["data"] else math.inf
    return place.step or 0, outside if place.micro_batch is None else place.micro_batch, phase


def report(
    answers: Mapping[int, Answer], silent: Mapping[int, Place | None], finished: Iterable[int], seconds: float
) -> str:
    """What the user reads.

    Args:
        answers: of the ranks that tell where they are.
        silent: the others, and where they were last; None: they never came so far.
        finished: ranks that had left the loop.
        seconds: no rank has moved for so long.
    """
    culprits = behind(answers, silent)
    lines = [f"the run stalled: no rank moved on for {seconds:.0f} s (train.stall_seconds)"]
    for rank in culprits:
        if rank in silent:
            place = silent[rank]
            last = "has told no place yet" if place is None else f"was last seen in {described(place)}"
            lines.append(f"  rank {rank} does not answer (killed, or stuck outside Python); it {last}")
        else:
            answer = answers[rank]
            lines.append(f"  rank {rank} is in {described(answer.place)}, for {answer.seconds:.0f} s")
            lines += [f"    has not come to {missing}" for missing in _missing(rank, answers)]
    others: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        if rank not in culprits:
            others.setdefault(described(answer.place._replace(samples=())), []).append(rank)
    lines += [f"  waiting: {_ranks(ranks)} in {place}" for place, ranks in others.items()]
    if finished := sorted(finished):
        lines.append(f"  finished: {_ranks(finished)}")
    by_stack: dict[str, list[int]] = {}
    for rank in culprits:
        if rank in answers:
            by_stack.setdefault(answers[rank].stack, []).append(rank)
    for stack, ranks in by_stack.items():
        lines += [f"  stack of {_ranks(ranks)}:", stack]
    return "\n".join(lines)


def described(place: Place) -> str:
    """``encode of image_encoder, step 3, micro-batch 0, samples a, b``."""
    where: str = place.phase or "the loop"
    if place.component:
        where += f" of {place.component}"
    if place.step is not None:
        where += f", step {place.step}"
    if place.micro_batch is not None:
        where += f", micro-batch {place.micro_batch}"
    if place.samples:
        shown = ", ".join(place.samples[:_MANY_SAMPLES])
        more = len(place.samples) - _MANY_SAMPLES
        where += f", samples {shown}" + (f" and {more} more" if more > 0 else "")
    return where


def _missing(rank: int, answers: Mapping[int, Answer]) -> list[str]:
    """Collectives that others have begun and ``rank`` has not."""
    lines = []
    for key, own in answers[rank].collectives.items():
        most = max(answer.collectives[key].begun for answer in answers.values() if key in answer.collectives)
        if own.begun < most:
            lines.append(f"collective {own.begun + 1} of the process group {own.group!r}; others are at {most}")
    return list(dict.fromkeys(lines))  # a group may count alike for several devices


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
