"""Find the ranks that stalled a run, and write the report for the user."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Phase = Literal["data", "encode", "forward", "backward", "optimizer", "save", "evaluate", "callbacks"]

_ORDER: dict[str | None, int] = {phase: index for index, phase in enumerate((None, *get_args(Phase)))}
_SHOWN_SAMPLES = 8


class RunningAction(NamedTuple):
    """The action of a schedule that a rank runs."""

    text: str  # such as ``backward of stage 3``
    number: int  # its index in the rank's list of actions; in a section, only messages count
    # (rank, index in its list) of the actions of other ranks that must have ended: they send what it needs, or come
    # before an action that these ranks run together with this one. -1: the rank must have begun its list
    needs: tuple[tuple[int, int], ...] = ()
    # of an encoder with actions of its own: the first of the micro-batches that it encodes together
    window: int | None = None


class Place(NamedTuple):
    """The position of a rank in training. None: outside of one."""

    step: int | None = None  # the optimizer step, from 1
    micro_batch: int | None = None  # index of the micro-batch in the step, from 0
    phase: Phase | None = None  # phase of the step
    component: str | None = None  # the component whose forward or backward runs
    samples: Sequence[str] = ()  # ids of the samples in the micro-batch
    action: RunningAction | None = None  # the action of its schedule that it runs, in a pipeline or with sections


class Collectives(NamedTuple):
    """The number of collectives that a rank has started on a group; if the counts of its ranks differ, one waits."""

    group: str
    begun: int


@dataclass(frozen=True)
class RankStatus:
    """The status that a rank reports: its position, for how long, its collectives by group and device.

    ``stack`` is the one of its main thread; in a pair of a forward and a backward, of the thread that has its turn.
    """

    place: Place
    seconds: float
    collectives: Mapping[str, Collectives]
    stack: str


def awaited_ranks(answers: Mapping[int, RankStatus], silent: Iterable[int] = ()) -> list[int]:
    """Return the ranks that the others wait for.

    These are the ``silent`` ones, whose process has ended, or cannot run Python; else the ranks that have started fewer
    collectives than another rank of a group, or have not sent a message to another stage or section, and wait for
    nobody themselves; else the ranks with the least progress in the step, which may be all.
    """
    if silent := sorted(silent):
        return silent
    senders = {rank: sender for rank in answers if (sender := _awaited(rank, answers)) is not None}
    late: set[int] = set(senders.values())
    waiting: set[int] = set(senders)
    for counts in _begun(answers).values():
        late |= {rank for rank, count in counts.items() if count < max(counts.values())}
        waiting |= {rank for rank, count in counts.items() if count > min(counts.values())}
    if late:
        return sorted(late - waiting or late)
    progress = {rank: _progress(answer.place) for rank, answer in answers.items()}
    return sorted(rank for rank, value in progress.items() if value == min(progress.values()))


def _begun(answers: Mapping[int, RankStatus]) -> dict[str, dict[int, int]]:
    """Key of the collectives of a group -> rank -> the number that it has started."""
    begun: dict[str, dict[int, int]] = {}
    for rank, answer in answers.items():
        for key, collectives in answer.collectives.items():
            begun.setdefault(key, {})[rank] = collectives.begun
    return begun


def _awaited(rank: int, answers: Mapping[int, RankStatus]) -> int | None:
    """A rank that has not sent the message, or not begun the collective, that the action of ``rank`` needs."""
    place = answers[rank].place
    needs = () if place.action is None else place.action.needs
    return next((n for n, index in needs if n in answers and not _is_past(answers[n].place, index, place.step)), None)


def _is_past(place: Place, index: int, step: int | None) -> bool:
    """Whether a rank is past an action of its list in a step."""
    if place.step != step:
        return (place.step or 0) > (step or 0)
    if place.action is not None:
        return place.action.number > index
    return _ORDER[place.phase] > _ORDER["backward"]  # it is done with its schedule


def _progress(place: Place) -> tuple[int, float, int]:
    """A sort key: the data phase comes before all micro-batches of a step, other phases outside of them after."""
    phase = _ORDER[place.phase]
    outside = -1 if phase <= _ORDER["data"] else math.inf
    return place.step or 0, outside if place.micro_batch is None else place.micro_batch, phase


def report(
    answers: Mapping[int, RankStatus], silent: Mapping[int, Place | None], finished: Iterable[int], seconds: float
) -> str:
    """Return the report for the user; ``silent``: rank without an answer -> its last known position, if any."""
    culprits = awaited_ranks(answers, silent)
    lines = [f"the run stalled: no rank made progress for {seconds:.0f} s (train.stall_seconds)"]
    for rank in culprits:
        if rank in silent:
            place = silent[rank]
            last = "never reported its position" if place is None else f"was last seen in {described(place)}"
            lines.append(f"  rank {rank} does not answer (killed, or stuck outside Python); it {last}")
        else:
            answer = answers[rank]
            lines.append(f"  rank {rank} is in {described(answer.place)}, for {answer.seconds:.0f} s")
            lines += [f"    has not started {missing}" for missing in _missing(rank, answers)]
    others: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        if rank not in culprits:
            where = described(answer.place._replace(samples=()))
            sender = _awaited(rank, answers)
            others.setdefault(where if sender is None else f"{where}, for rank {sender}", []).append(rank)
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
    """Format a position like ``encode of image_encoder, step 3, micro-batch 0, samples a, b``.

    In a pipeline: ``forward of stage 0 (image_encoder), step 3, ...``. In a section: ``encoding of image_encoder from
    micro-batch 0 in section vision, step 3``.
    """
    where: str = place.phase or "the loop"
    if place.action is not None:
        where = place.action.text + (f" ({place.component})" if place.component else "")
    elif place.component:
        where += f" of {place.component}"
    if place.step is not None:
        where += f", step {place.step}"
    if place.micro_batch is not None:
        where += f", micro-batch {place.micro_batch}"
    if place.samples:
        shown = ", ".join(place.samples[:_SHOWN_SAMPLES])
        more = len(place.samples) - _SHOWN_SAMPLES
        where += f", samples {shown}" + (f" and {more} more" if more > 0 else "")
    return where


def _missing(rank: int, answers: Mapping[int, RankStatus]) -> list[str]:
    """The next collectives that other ranks have started and ``rank`` has not."""
    lines, begun = [], _begun(answers)
    for key, (group, started) in answers[rank].collectives.items():
        most = max(begun[key].values())
        if started < most:
            lines.append(f"collective {started + 1} of the process group {group!r}; others are at {most}")
    return list(dict.fromkeys(lines))  # a group may have equal counts for several devices


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
