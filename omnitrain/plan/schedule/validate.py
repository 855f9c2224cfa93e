"""Find the problems of a lowered schedule, and describe them in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import (
    COLLECTIVES,
    ENCODES,
    FOUNDATION,
    RECEIVES,
    SEND_OF,
    SENDS,
    WEIGHTS,
    Action,
    Channel,
    Kind,
    Schedule,
)
from omnitrain.plan.schedule.simulate import DeadlockError, simulate

_Place = tuple[int, int]  # rank, index in its list
_MAX_SHOWN = 8


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a schedule.

    Attributes:
        rank: pipeline rank where it shows.
        message: what is wrong, with rank, action and what is missing.
        actions: the actions that it is about, missing ones included.
    """

    rank: int
    message: str
    actions: tuple[Action, ...]


def validate(
    schedule: Schedule,
    *,
    lowered: bool = True,
    max_live: int | None = None,
    connected: Collection[Channel] | None = None,
) -> None:
    """Raise if a schedule cannot run; arguments as for :func:`problems_in`.

    Raises:
        ScheduleError: with all problems found.
    """
    problems = problems_in(schedule, lowered=lowered, max_live=max_live, connected=connected)
    if problems:
        lines = [problem.message for problem in problems[:_MAX_SHOWN]]
        if len(problems) > _MAX_SHOWN:
            lines.append(f"and {len(problems) - _MAX_SHOWN} more")
        raise ScheduleError("this schedule cannot run:\n  " + "\n  ".join(lines))


def problems_in(
    schedule: Schedule,
    *,
    lowered: bool = True,
    max_live: int | None = None,
    connected: Collection[Channel] | None = None,
) -> tuple[Problem, ...]:
    """Return what is wrong with a schedule.

    A schedule without a problem: each stage runs each micro-batch once, forward and backward (``B``, or ``I`` and
    ``W``), on the stage's rank. Each result that another rank needs is sent and received once, in the same order at
    both ends. It runs to its end even if a send ends only when its receive is posted, so it does with buffers of any
    size, too. Collectives over all pipeline ranks come in the same order on all of them. Features of encoders are there
    before the forwards that need them, and the encoders' backward comes after these forwards' backwards. If it says
    when weights are gathered, each action finds its stage's weights gathered, all are freed at the end, and the
    gradients of a stage are reduced once, after its last backward.

    Args:
        schedule: the schedule to check.
        lowered: whether it must have sends and receives (:func:`~omnitrain.plan.schedule.lower.lower`). False: it must
            have none.
        max_live: the largest number of (stage, micro-batch) whose activations a rank may keep. None: any number.
        connected: the channels whose ranks are connected before the step; see
            :func:`~omnitrain.plan.schedule.simulate.simulate`. None: all.

    Returns:
        The problems. Those that would only follow from others are left out.
    """
    problems = [*_counts(schedule, lowered)] or [
        *_message_orders(schedule),
        *_collectives(schedule),
        *_weights(schedule),
        *_encoders(schedule),
        *_sections(schedule),
    ]
    problems = problems or [*_deadlock(schedule, connected)]
    if not problems and max_live is not None:
        problems = [*_live(schedule, max_live)]
    return tuple(problems)


def _counts(schedule: Schedule, lowered: bool) -> Iterator[Problem]:
    """Each action that the stages and micro-batches imply is there once, on its rank, and no other is."""
    expected = _expected(schedule, lowered)
    places: dict[Action, list[_Place]] = defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            for part in action.passes or (action,):
                if part.kind not in WEIGHTS | COLLECTIVES and (part.stage is not None or part.passes):
                    places[part].append((rank, index))
    for action, found in places.items():
        rank, index = found[0]
        if expected.get(action) == rank and len(found) == 1:
            continue
        where = f"rank {rank}, action {index}, {action}"
        if action not in expected:
            yield Problem(rank, f"{where}: {_reason(schedule, action)}", (action,))
        elif len(found) > 1:
            others = ", ".join(f"action {i} of rank {r}" for r, i in found[1:])
            yield Problem(rank, f"{where}: is there again as {others}; it must be there once", (action,))
        else:
            yield Problem(rank, f"{where}: stage {action.stage} is on rank {expected[action]}", (action,))
    for action, rank in expected.items():
        if action not in places:
            yield Problem(rank, f"rank {rank}: {action} is missing", (action,))


def _expected(schedule: Schedule, lowered: bool) -> dict[Action, int]:
    """Return the passes and messages that a schedule must have, each with its rank."""
    is_split = {
        (part.stage, part.micro_batch)
        for row in schedule.actions
        for action in row
        for part in action.passes
        if part.kind in (Kind.I, Kind.W)
    }
    expected: dict[Action, int] = {}
    for stage, rank in enumerate(schedule.stage_ranks):
        for k in range(schedule.num_micro_batches):
            kinds = (Kind.F, Kind.I, Kind.W) if (stage, k) in is_split else (Kind.F, Kind.B)
            for kind in kinds:
                expected[Action(kind, stage, k)] = rank
                next_stage = stage + (1 if kind is Kind.F else -1)
                if not lowered or kind is Kind.W or not 0 <= next_stage < schedule.num_stages:
                    continue
                peer = schedule.stage_ranks[next_stage]
                if peer != rank:
                    send = Action(SEND_OF[kind], stage, k, peer)
                    expected[send], expected[send.receive(rank)] = rank, peer
    return expected


def _reason(schedule: Schedule, action: Action) -> str:
    """Say why an action is not one of the schedule's."""
    stage, micro_batch = action.stage, action.micro_batch
    if stage is None or not 0 <= stage < schedule.num_stages:
        return f"there is no such stage; stages are 0 to {schedule.num_stages - 1}"
    if micro_batch is None or not 0 <= micro_batch < schedule.num_micro_batches:
        return f"there is no such micro-batch; micro-batches are 0 to {schedule.num_micro_batches - 1}"
    if action.kind is Kind.B:
        return f"the backward of stage {stage}, micro-batch {micro_batch} is there as I or W, too"
    other = stage + (1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1)
    if action.kind in SENDS | RECEIVES and 0 <= other < schedule.num_stages:
        ends = f"stage {stage} is on rank {schedule.stage_ranks[stage]}, stage {other} on {schedule.stage_ranks[other]}"
        return f"{ends}, so " + (
            "nothing is sent between them"
            if schedule.stage_ranks[stage] == schedule.stage_ranks[other]
            else f"its peer is rank {schedule.stage_ranks[other]}"
        )
    return f"stage {stage} of {schedule.num_stages} has no such action"


def _message_orders(schedule: Schedule) -> Iterator[Problem]:
    """Between two ranks, receives are posted in the order of the sends: messages of one kind cannot overtake."""
    sends: dict[Channel, list[Action]] = defaultdict(list)
    receives: dict[Channel, list[Action]] = defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in SENDS | RECEIVES:
                (sends if action.kind in SENDS else receives)[action.channel(rank)].append(action)
    for channel in dict.fromkeys((*sends, *receives)):
        kind, _, sender, receiver = channel
        for number, (send, receive) in enumerate(zip_longest(sends[channel], receives[channel])):
            expected = None if send is None else send.receive(sender)
            if receive != expected:
                yield Problem(
                    receiver,
                    f"rank {receiver}: receive {number} of {kind} from rank {sender} is {receive or 'missing'}, but "
                    f"rank {sender} sends {send or 'nothing'} then; receives must be posted in the order of the sends",
                    tuple(action for action in (send, receive, expected) if action is not None),
                )


def _collectives(schedule: Schedule) -> Iterator[Problem]:
    """Collectives over all pipeline ranks come in the same order on all of them."""
    rows = schedule.actions[: schedule.num_pipeline_ranks]
    orders = [[action for action in row if action.kind in COLLECTIVES] for row in rows]
    for rank, order in enumerate(orders):
        for number, (action, first) in enumerate(zip_longest(order, orders[0])):
            if action != first:
                message = (
                    f"collective {number} of all pipeline ranks is {action or 'missing'} on rank {rank} and "
                    f"{first or 'missing'} on rank 0; all ranks must have the same ones in the same order"
                )
                yield Problem(rank, message, tuple(a for a in (action, first) if a is not None))
                break


def _weights(schedule: Schedule) -> Iterator[Problem]:
    """Where a schedule says when weights are gathered and gradients reduced, it is complete."""
    says = any(action.kind in WEIGHTS for row in schedule.actions[: schedule.num_pipeline_ranks] for action in row)
    for rank, row in enumerate(schedule.actions):
        if not says and rank < schedule.num_pipeline_ranks:
            continue
        yield from _gathered(schedule, rank, row)
        yield from _reduced(schedule, rank, row)


def _gathered(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> Iterator[Problem]:
    gathered: set[Action] = set()
    for index, action in enumerate(row):
        where = f"rank {rank}, action {index}, {action}"
        unshard, reshard = (action._replace(kind=kind) for kind in (Kind.UNSHARD, Kind.RESHARD))
        is_of_stage = action.component == FOUNDATION
        if action.kind in WEIGHTS and is_of_stage and action.stage not in schedule.stages_of(rank):
            yield Problem(rank, f"{where}: the stages of this rank are {schedule.stages_of(rank)}", (action,))
        elif action.kind is Kind.UNSHARD:
            if unshard in gathered:
                yield Problem(rank, f"{where}: these weights are gathered already", (action, reshard))
            gathered.add(unshard)
        elif action.kind is Kind.RESHARD:
            if unshard not in gathered:
                yield Problem(rank, f"{where}: these weights are not gathered", (action, unshard))
            gathered.discard(unshard)
        for unshard in dict.fromkeys(_needed_weights(action)):
            if unshard not in gathered:
                reshard = unshard._replace(kind=Kind.RESHARD)
                whose = f"stage {unshard.stage}" if is_of_stage else unshard.component
                message = f"{where}: the weights of {whose} are not gathered; {unshard} must come before"
                yield Problem(rank, message, (action, unshard, reshard))
                gathered.add(unshard)
    for unshard in gathered:
        reshard = unshard._replace(kind=Kind.RESHARD)
        whose = f"stage {unshard.stage}" if unshard.component == FOUNDATION else unshard.component
        message = f"rank {rank}: {reshard} is missing; {whose} stays gathered after the step"
        yield Problem(rank, message, (reshard, unshard))


def _needed_weights(action: Action) -> Iterator[Action]:
    if action.kind in (Kind.ENCODE, Kind.ENCODE_B):
        yield Action(Kind.UNSHARD, component=action.component)
    for part in action.passes:
        yield Action(Kind.UNSHARD, part.stage)


def _reduced(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> Iterator[Problem]:
    last = {Action(Kind.REDUCE, stage): -1 for stage in schedule.stages_of(rank)}
    for index, action in enumerate(row):
        last |= {Action(Kind.REDUCE, part.stage): index for part in action.passes if part.kind is not Kind.F}
        if action.kind is Kind.ENCODE_B:
            last[Action(Kind.REDUCE, component=action.component)] = index
    for action, backward in last.items():
        found = [index for index, other in enumerate(row) if other == action]
        if len(found) != 1:
            message = f"rank {rank}: {action} is there {len(found)} times; it must be there once"
            yield Problem(rank, message, (action,))
        elif found[0] < backward:
            message = f"rank {rank}, action {found[0]}, {action}: comes before {row[backward]}, its last backward"
            yield Problem(rank, message, (action, row[backward]))


def _encoders(schedule: Schedule) -> Iterator[Problem]:
    """The first stage has the features of a window when it needs them, and their gradients when they are used."""
    rank = schedule.stage_ranks[0]
    row = schedule.actions[rank]
    at = {part: index for index, action in enumerate(row) for part in action.passes or (action,)}
    for component in dict.fromkeys(action.component for action in row if action.kind in ENCODES):
        mine = [action for action in row if action.component == component]
        starts = sorted({action.micro_batch or 0 for action in mine if action.kind in ENCODES} | {0})
        is_trained = any(action.kind in (Kind.ENCODE_B, Kind.REDUCE) for action in mine)
        for start, stop in pairwise([*starts, schedule.num_micro_batches]):
            yield from _encoder_window(rank, at, component, range(start, stop), is_trained)


def _encoder_window(
    rank: int, at: Mapping[Action, int], component: str, micro_batches: range, is_trained: bool
) -> Iterator[Problem]:
    """A window is encoded, exchanged, read and run backward in this order; ``at`` has the index of each action."""
    kinds = (Kind.ENCODE, Kind.EXCHANGE, *((Kind.ENCODE_B,) if is_trained else ()))
    of_window = [Action(kind, micro_batch=micro_batches.start, component=component) for kind in kinds]
    if missing := [action for action in of_window if action not in at]:
        yield Problem(rank, f"rank {rank}: {missing[0]} is missing", tuple(missing))
        return
    encode, exchange, *backward = (at[action] for action in of_window)
    forwards = [at[Action(Kind.F, 0, k)] for k in micro_batches]
    ends = [at[action] for action in _ends(micro_batches, at)]
    order = [encode, exchange, min(forwards), *([max(ends), *backward] if is_trained else [])]
    if order != sorted(order):
        message = (
            f"rank {rank}, action {encode}, {of_window[0]}: expected the exchange, the forwards of micro-batches "
            f"{micro_batches.start} to {micro_batches.stop - 1}, their backwards and the encoder's backward to follow "
            "in this order"
        )
        yield Problem(rank, message, tuple(of_window))


def _ends(micro_batches: range, there: Collection[Action]) -> list[Action]:
    """The actions ``there`` after which the first stage has the gradients of its inputs."""
    return [a for k in micro_batches for a in (Action(Kind.B, 0, k), Action(Kind.I, 0, k)) if a in there]


def _sections(schedule: Schedule) -> Iterator[Problem]:
    """A section sends what it has encoded; those who read it have it, and return its gradients, in time."""
    readers = _readers(schedule)
    for rank, section in enumerate(schedule.sections, schedule.num_pipeline_ranks):
        first = schedule.stage_ranks[0]
        places: dict[Action, list[int]] = defaultdict(list)
        for of_rank in dict.fromkeys((first, rank, *(readers[c][0] for c in section.components if c in readers))):
            for index, action in enumerate(schedule.actions[of_rank]):
                for part in action.passes or (action,):
                    places[part].append(index)
        windows = [
            (action.component, action.micro_batch)
            for action in places
            if action.stage is None and action.micro_batch is not None and action.component in section.components
        ]
        windows = [window for window in windows if window[1] < schedule.num_micro_batches]  # others: the next step's
        for component, start in dict.fromkeys(windows):
            for of_rank, actions in _of_window(schedule, rank, places, component, start, readers.get(component)):
                listed = ", ".join(map(str, actions))
                indices = [index for action in actions for index in places.get(action, ())]
                if indices != sorted(indices) or len(indices) != len(actions):
                    message = f"rank {of_rank}: expected {listed}, each once and in this order"
                    yield Problem(of_rank, message, tuple(actions))


def _readers(schedule: Schedule) -> dict[str, tuple[int, str]]:
    """Component whose features a section reads -> the list of that section, and its component that reads them."""
    return {
        read: (rank, component)
        for rank, section in enumerate(schedule.sections, schedule.num_pipeline_ranks)
        for component, read in section.reads
    }


def _of_window(
    schedule: Schedule,
    rank: int,
    places: Mapping[Action, Sequence[int]],
    component: str,
    start: int,
    reader: tuple[int, str] | None,
) -> Iterator[tuple[int, list[Action]]]:
    """Yield the actions of a window on the section's ranks, and those where its features are read, in order."""
    section = schedule.sections[rank - schedule.num_pipeline_ranks]
    micro_batches = range(start, min(start + section.size, schedule.num_micro_batches))
    encode = Action(Kind.ENCODE, None, start, None, component)
    if reader is None:
        peer, uses = schedule.stage_ranks[0], [Action(Kind.F, 0, k) for k in micro_batches]
        ends = _ends(micro_batches, places)
    else:
        peer, uses = reader[0], [encode._replace(component=reader[1])]
        ends = [encode._replace(kind=Kind.ENCODE_B, component=reader[1])]
    here = [*([] if section.ahead else [encode]), encode._replace(kind=Kind.SEND_F, peer=peer)]
    backward = [encode._replace(kind=Kind.RECV_B, peer=peer), encode._replace(kind=Kind.ENCODE_B)]
    there = [encode._replace(kind=Kind.RECV_F, peer=rank), min(uses, key=lambda action: [*places.get(action, ())])]
    returned = encode._replace(kind=Kind.SEND_B, peer=rank)
    if any(action in places for action in (*backward, returned)):
        here += backward
        there += [max(ends, key=lambda action: [*places.get(action, ())]), returned]
    yield rank, here
    yield peer, there


def _deadlock(schedule: Schedule, connected: Collection[Channel] | None) -> Iterator[Problem]:
    """It ends under the rules of NCCL: a send waits for its receive, and two ranks connect at their first message."""
    try:
        simulate(schedule, lambda _: 0, slots=0, connected=connected)
    except DeadlockError as error:
        actions = [a for wait in error.waits for a in (wait.action, wait.needed_action) if a is not None]
        yield Problem(error.waits[0].rank, str(error), tuple(dict.fromkeys(actions)))


def _live(schedule: Schedule, max_live: int) -> Iterator[Problem]:
    """No rank keeps more activations than it may."""
    for rank, row in enumerate(schedule.actions):
        live = 0
        for index, action in enumerate(row):
            for part in action.passes:
                live += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(part.kind, 0)
            if live > max_live:
                yield Problem(
                    rank,
                    f"rank {rank}, action {index}, {action}: keeps activations of {live} micro-batches and stages; at "
                    f"most {max_live} are allowed",
                    (action,),
                )
                break
