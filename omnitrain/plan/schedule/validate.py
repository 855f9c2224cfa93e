"""Find the problems of a lowered schedule, and describe them in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product, zip_longest
from typing import NamedTuple

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import (
    COLLECTIVES,
    ENCODES,
    FOUNDATION,
    LOSS,
    RECEIVE_OF,
    RECEIVES,
    SENDS,
    STATES,
    WEIGHTS,
    Action,
    Kind,
    Schedule,
)
from omnitrain.plan.schedule.simulate import DeadlockError, simulate

_Places = Mapping[Action, Sequence[int]]  # an action (or part of an overlap) -> where it is in a rank's list
_MAX_SHOWN = 8


class Problem(NamedTuple):
    """Something that is wrong with a schedule."""

    rank: int  # pipeline rank where it shows
    message: str  # the problem, with rank, action and missing action
    actions: tuple[Action, ...]  # the actions that it is about, missing ones included


def validate(schedule: Schedule, *, lowered: bool = True) -> None:
    """Raise ScheduleError with all problems (see :func:`problems_in`) if a schedule cannot run."""
    problems = problems_in(schedule, lowered=lowered)
    if problems:
        lines = [problem.message for problem in problems[:_MAX_SHOWN]]
        if len(problems) > _MAX_SHOWN:
            lines.append(f"and {len(problems) - _MAX_SHOWN} more")
        raise ScheduleError("this schedule cannot run:\n  " + "\n  ".join(lines))


def problems_in(schedule: Schedule, *, lowered: bool = True) -> tuple[Problem, ...]:
    """Return the problems of a schedule, without problems that only follow from others of them.

    Each stage runs each micro-batch once, forward and backward (``B``, or ``I`` and ``W``), on the stage's rank. Each
    result that another rank needs is sent and received once (not before it is ``lowered``), in the same order at both
    ends. It ends even if each send waits until its receive is posted. Collectives over all pipeline ranks come in the
    same order on all of them. Encoders run before the forwards that need them, and backward after their backwards. If
    it says when weights are gathered, they are for each action, are freed at the end, and gradients are reduced once,
    after the last backward.
    """
    problems = [*_counts(schedule, lowered)] or [
        *_message_orders(schedule),
        *_collectives(schedule),
        *_weights(schedule),
        *_features(schedule),
    ]
    return tuple(problems or _deadlock(schedule))


def _counts(schedule: Schedule, lowered: bool) -> Iterator[Problem]:
    """Each action that the stages and micro-batches imply is there once, on its rank, and no other is."""
    expected = _expected(schedule, lowered)
    places: dict[Action, list[tuple[int, int]]] = defaultdict(list)  # rank, index in its list
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
    passes = (part for row in schedule.actions for action in row for part in action.passes)
    is_split = {(part.component, part.stage, part.micro_batch) for part in passes if part.kind in (Kind.I, Kind.W)}
    expected: dict[Action, int] = {}
    for node in schedule.staged.values():
        for (stage, rank), k in product(enumerate(node.ranks), node.windows):
            kinds = (Kind.I, Kind.W) if (node.component, stage, k) in is_split else (Kind.B,)
            for kind in (Kind.F, *kinds * node.is_trained):
                expected[part := Action(kind, stage, k, component=node.component)] = rank
                if lowered and (send := schedule.send_of(part)) is not None:
                    assert send.peer is not None
                    expected[send], expected[send.receive(rank)] = rank, send.peer
    return expected


def _reason(schedule: Schedule, action: Action) -> str:
    """Say why an action is not one of the schedule's."""
    stage, micro_batch = action.stage, action.micro_batch
    ranks = schedule.staged[action.component].ranks if action.component in schedule.staged else ()
    if stage is None or not 0 <= stage < len(ranks):
        return f"there is no such stage; stages are 0 to {len(ranks) - 1}"
    if micro_batch is None or not 0 <= micro_batch < schedule.num_micro_batches:
        return f"there is no such micro-batch; micro-batches are 0 to {schedule.num_micro_batches - 1}"
    if action.kind is Kind.B:
        return f"the backward of stage {stage}, micro-batch {micro_batch} is there as I or W, too"
    other = stage + (1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1)
    if action.kind in SENDS | RECEIVES and 0 <= other < len(ranks):
        here, there = ranks[stage], ranks[other]
        peer = "nothing is sent between them" if here == there else f"its peer is rank {there}"
        return f"stage {stage} is on rank {here}, stage {other} on {there}, so {peer}"
    return f"stage {stage} of {len(ranks)} has no such action"


def _message_orders(schedule: Schedule) -> Iterator[Problem]:
    """Between two ranks, receives are posted in the order of the sends: messages of one kind cannot overtake."""
    channels: dict[tuple[Kind, str, int, int], tuple[list[Action], list[Action]]] = defaultdict(lambda: ([], []))
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in SENDS:
                channels[RECEIVE_OF[action.kind], action.component, rank, action.peer or 0][0].append(action)
            elif action.kind in RECEIVES:
                channels[action.kind, action.component, action.peer or 0, rank][1].append(action)
    for (kind, _, sender, receiver), messages in channels.items():
        for number, (send, receive) in enumerate(zip_longest(*messages)):
            expected = None if send is None else send.receive(sender)
            if receive != expected:
                yield Problem(
                    receiver,
                    f"rank {receiver}: {kind} {number} from rank {sender} is {receive or 'missing'}, but rank {sender} "
                    f"sends {send or 'nothing'} then; receives must be posted in the order of the sends",
                    tuple(action for action in (send, receive, expected) if action is not None),
                )


def _collectives(schedule: Schedule) -> Iterator[Problem]:
    """Collectives over all pipeline ranks come in the same order on all of them."""
    rows = schedule.actions[: schedule.num_pipeline_ranks]
    orders = [[action for action in row if action.kind in COLLECTIVES] for row in rows]
    for rank, order in enumerate(orders):
        for number, (action, first) in enumerate(zip_longest(order, orders[0])):
            if action != first:
                found = f"collective {number} of all pipeline ranks is {action or 'missing'} on rank {rank}"
                expected = f"{first or 'missing'} on rank 0; all ranks must have the same ones in the same order"
                yield Problem(rank, f"{found} and {expected}", tuple(a for a in (action, first) if a is not None))
                break


def _weights(schedule: Schedule) -> Iterator[Problem]:
    """Where a schedule says when weights are gathered and gradients reduced, it is complete."""
    says = any(action.kind in WEIGHTS for row in schedule.actions[: schedule.num_pipeline_ranks] for action in row)
    for rank, row in enumerate(schedule.actions):
        if says or rank >= schedule.num_pipeline_ranks:
            yield from _gathered(schedule, rank, row)
            yield from _reduced(schedule, rank, row)


def _gathered(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> Iterator[Problem]:
    """Weights are gathered for each action that needs them, once at a time, and are freed at the end."""
    gathered: set[Action] = set()
    for index, action in enumerate(row):
        where = f"rank {rank}, action {index}, {action}"
        unshard, reshard = (action._replace(kind=kind) for kind in (Kind.UNSHARD, Kind.RESHARD))
        if action.kind in WEIGHTS and action.component == FOUNDATION and action.stage not in schedule.stages_of(rank):
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
                message = f"{where}: its weights are not gathered; {unshard} must come before"
                yield Problem(rank, message, (action, unshard, unshard._replace(kind=Kind.RESHARD)))
                gathered.add(unshard)
    for unshard in gathered:
        reshard = unshard._replace(kind=Kind.RESHARD)
        yield Problem(rank, f"rank {rank}: {reshard} is missing; weights stay gathered", (reshard, unshard))


def _needed_weights(action: Action) -> list[Action]:
    if action.kind in (Kind.ENCODE, Kind.HEAD, Kind.ENCODE_B):
        return [Action(Kind.UNSHARD, component=action.component)]
    return [Action(Kind.UNSHARD, part.stage, component=part.component) for part in action.passes]


def _reduced(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> Iterator[Problem]:
    last = {Action(Kind.REDUCE, stage): -1 for stage in schedule.stages_of(rank)}
    for index, action in enumerate(row):
        backwards = (part for part in action.passes if part.kind is not Kind.F)
        last |= {Action(Kind.REDUCE, part.stage, component=part.component): index for part in backwards}
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


def _features(schedule: Schedule) -> Iterator[Problem]:
    """Features are there when they are read; their call runs backward after the backwards of all readers."""
    at: list[dict[Action, list[int]]] = [defaultdict(list) for _ in schedule.actions]
    for places, row in zip(at, schedule.actions, strict=True):
        for index, action in enumerate(row):
            for part in action.passes or (action,):
                places[part].append(index)
    by_windows = (*_windows_of_main(schedule, at), *_windows_of_sections(schedule, at))
    for rank, expected in (*by_windows, *_losses_of_sections(schedule, at)):
        indices = [index for action in expected for index in at[rank].get(action, ())]
        if indices != sorted(indices) or len(indices) != len(expected):
            message = f"rank {rank}: expected {', '.join(map(str, expected))}, each once and in this order"
            yield Problem(rank, message, tuple(expected))


def _windows_of_main(schedule: Schedule, at: Sequence[_Places]) -> Iterator[tuple[int, list[Action]]]:
    """Yield the actions of the first stage's rank for each window that all pipeline ranks encode, in order."""
    rank = schedule.stage_ranks[0]
    encodes = [action for action in at[rank] if action.kind in ENCODES]
    for component in dict.fromkeys(action.component for action in encodes):
        mine = [action for action in encodes if action.component == component]
        is_trained = Action(Kind.REDUCE, component=component) in at[rank]
        is_trained |= any(action.kind is Kind.ENCODE_B for action in mine)
        starts = sorted({action.micro_batch or 0 for action in mine} | {0, schedule.num_micro_batches})
        for start, stop in pairwise(starts[: starts.index(schedule.num_micro_batches) + 1]):
            first, last = _first_and_last(at[rank], range(start, stop))
            encode = Action(Kind.ENCODE, micro_batch=start, component=component)
            backward = [last, encode._replace(kind=Kind.ENCODE_B)] if is_trained else []
            yield rank, [encode, encode._replace(kind=Kind.EXCHANGE), first, *backward]


def _windows_of_sections(schedule: Schedule, at: Sequence[_Places]) -> Iterator[tuple[int, list[Action]]]:
    """Yield the actions of a section for each of its windows, and of the readers of its features, in order."""
    readers = {read: (section, reader) for section in schedule.sections for reader, read in section.reads.items()}
    listed = dict.fromkeys((a.component, a.micro_batch) for places in at for a in places if a.stage is None)
    for section in schedule.sections:
        rank = schedule.rows_of_sections[section.name][-1]
        for component, start in listed:
            if component not in section.encoded or start is None or start >= schedule.num_micro_batches:
                continue  # of another section, for its weights, or of the next step
            micro_batches = range(start, min(start + section.size, schedule.num_micro_batches))
            message = Action(Kind.SEND_F, micro_batch=start, component=component)
            stage = schedule.stage_reading(section)
            peer = schedule.stage_ranks[stage]
            first, last = _first_and_last(at[peer], micro_batches, stage)
            if component in readers:
                reading, reader = readers[component]
                peer = schedule.rows_of_sections[reading.name][0]
                first, last = reading.passes_of(reader, start, 0)
            encode, encode_b = section.passes_of(component, start, section.num_stages - 1)
            here = [*([] if section.is_encoded else [encode]), message._replace(peer=peer)]
            backward = [message._replace(kind=Kind.RECV_B, peer=peer), encode_b]
            read = [message._replace(kind=Kind.RECV_F, peer=rank), first]
            returned = message._replace(kind=Kind.SEND_B, peer=rank)
            if returned in at[peer] or any(action in at[rank] for action in backward):
                here += backward
                read += [last, returned]
            yield rank, here
            yield peer, read


def _losses_of_sections(schedule: Schedule, at: Sequence[_Places]) -> Iterator[tuple[int, list[Action]]]:
    """Yield the actions of the last stage's rank and of a section for each loss that the section computes, in order."""
    main, stage = schedule.stage_ranks[-1], schedule.num_stages - 1
    for section in schedule.sections:
        rank = schedule.rows_of_sections[section.name][-1]
        for decoder, k in ((name, k) for name, micro_batches in section.heads.items() for k in micro_batches):
            backwards = (Action(kind, stage, k) for kind in (Kind.B, Kind.I))
            states = Action(Kind.SEND_F, None, k, rank, f"{decoder}{STATES}")
            loss = Action(Kind.SEND_F, None, k, main, f"{decoder}{LOSS}")
            encode = section.passes_of(decoder, k, section.num_stages - 1)[0]
            head = Action(Kind.HEAD, None, k, component=decoder)
            yield rank, [*([] if section.is_encoded else [encode]), states.receive(main), head, loss]
            ends = [action for action in backwards if action in at[main]]
            yield main, [Action(Kind.F, stage, k), states, loss.receive(rank), *ends]


def _first_and_last(places: _Places, micro_batches: range, stage: int = 0) -> tuple[Action, Action]:
    """Return the first forward of a stage, and the last action that has the gradients of its inputs."""
    forwards = [Action(Kind.F, stage, k) for k in micro_batches]
    backwards = (Action(kind, stage, k) for k in micro_batches for kind in (Kind.B, Kind.I))
    ends = [end for end in backwards if end in places]
    return min(forwards, key=lambda action: [*places[action]]), max(ends, key=lambda action: [*places[action]])


def _deadlock(schedule: Schedule) -> Iterator[Problem]:
    """It ends under the rule of NCCL: a send waits for its receive."""
    try:
        simulate(schedule, lambda _: 0, slots=0)
    except DeadlockError as error:
        actions = [a for wait in error.waits for a in (wait.action, wait.needed_action) if a is not None]
        yield Problem(error.waits[0].rank, str(error), tuple(dict.fromkeys(actions)))
