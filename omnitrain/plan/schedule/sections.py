"""Components with ranks of their own: their actions in a schedule, and their messages to and from the other ranks."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, compress
from typing import NamedTuple

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import (
    FOUNDATION,
    LOSS,
    STATES,
    Action,
    Kind,
    Schedule,
    SectionWindows,
    rows_of_sections,
)
from omnitrain.plan.schedule.encoders import uses_of_windows, with_weights
from omnitrain.plan.schedule.simulate import Durations, Event, simulate


class _Turn(NamedTuple):
    """When the features of a window are used, by the stage that reads them or by another section."""

    window: int  # its first micro-batch
    begins: float  # seconds at which the first of its forwards starts, if no features are late
    ends: float  # seconds at which the last of its backwards ends
    needs: int  # number of turns whose features must be there before it can end


class _Head(NamedTuple):
    """When the loss of a micro-batch can be computed, and when it is needed."""

    micro_batch: int
    begins: float  # seconds at which the last stage has its hidden states, if no features and no losses are late
    ends: float  # seconds at which the last stage begins its backward
    needs: int  # number of turns whose features must be there before


class _Pass(NamedTuple):
    """A window that a section encodes, or whose heads or backward it runs, and when."""

    window: int
    kind: Kind  # ENCODE, HEAD or ENCODE_B
    starts: float
    ends: float


def with_sections(
    schedule: Schedule, sections: Sequence[SectionWindows], durations: Durations, encoding: Callable[[str, int], float]
) -> Schedule:
    """Return a schedule with a list of actions for each section, after those of the pipeline ranks.

    A section's list has ``ENCODE`` and ``SEND_F`` for each window and component, ``RECV_B`` and ``ENCODE_B`` for
    trained ones. The first stage gets ``RECV_F``, which waits for the features, before the first forward that reads
    them, and ``SEND_B`` after the last backward that gives them gradients; so does the last stage for ``at_end``, and a
    section that reads features of another one, around its ``ENCODE`` and ``ENCODE_B``. Windows are encoded in the order
    in which they are needed. Of a decoder, ``HEAD`` computes the loss of a micro-batch: the last stage sends the hidden
    states behind its forward, and waits for what comes back before its backward. A section runs a head as soon as it
    can, the next forward if slots and ``in_flight`` allow, otherwise the backward that became possible first.
    ``encoding``: component and window -> seconds of a forward; a backward takes twice as long, and a head three times.
    Raises ScheduleError: a section may keep fewer windows than the first stage needs before its first backward.
    """
    if not sections or not schedule.num_micro_batches:
        return schedule
    timeline, last_rank, last = simulate(schedule, durations), schedule.stage_ranks[-1], schedule.num_stages - 1
    rows = [list(row) for row in schedule.actions]
    rows_of = rows_of_sections(sections, len(rows))
    row_of = {component: rows_of[section.name] for section in sections for component in section.encoded}
    peers = _readers(schedule, sections, row_of)
    passes: dict[str, list[_Pass]] = {}
    for section in _readers_first(sections):
        stage = schedule.stage_reading(section)
        events = timeline.events[schedule.stage_ranks[stage]]
        turns = _turns(events, stage, section, [passes[s.name] for s in sections if _feeds(section, s)])
        heads = _heads(timeline.events[last_rank], last, section, turns)
        passes[section.name] = [*_order(section, turns, heads, encoding, _limiting(section, sections))]
    trained = frozenset[str]().union(*(section.trained for section in sections))
    for section in sections:
        peer, stage = rows_of[section.name][-1], schedule.stage_reading(section)
        rank = schedule.stage_ranks[stage]
        to_main = [component for component in section.encoded if peers[component] == rank]
        rows[rank] = _with_messages(rows[rank], section, to_main, peer, stage)
        rows[last_rank] = _with_losses(rows[last_rank], last, section, peer)
        passes_of = passes[section.name]
        stages = range(section.num_stages)
        rows += [_actions(section, k, passes_of, peers | {FOUNDATION: last_rank}, row_of, trained) for k in stages]
    return replace(schedule, actions=tuple(map(tuple, rows)), sections=tuple(sections))


def _readers(schedule: Schedule, sections: Sequence[SectionWindows], row_of: Mapping[str, range]) -> dict[str, int]:
    """Component of a section -> the list of those who read its features; ``row_of``: the lists of its section."""
    main = {section.name: schedule.stage_ranks[schedule.stage_reading(section)] for section in sections}
    found = {component: main[section.name] for section in sections for component in section.encoded}
    return found | {read: row_of[reader][0] for section in sections for reader, read in section.reads.items()}


def _feeds(section: SectionWindows, other: SectionWindows) -> bool:
    return any(read in section.encoded for read in other.reads.values())


def _limiting(section: SectionWindows, sections: Sequence[SectionWindows]) -> SectionWindows:
    """The section that limits for how many windows this one may be ahead: itself, or one that it reads."""
    read = [_limiting(other, sections) for other in sections if _feeds(other, section)]
    return min([section, *read], key=lambda other: other.keeps)


def _readers_first(sections: Sequence[SectionWindows]) -> Iterator[SectionWindows]:
    """Yield each section after those that read its features; two that read each other's are a ScheduleError."""
    left = list(sections)
    while left:
        ready = [section for section in left if not any(_feeds(section, other) for other in left)]
        if not ready:
            names = " and ".join(section.name for section in left)
            raise ScheduleError(
                f"sections.{left[0].name}.components: {names} read features of each other, and would wait for each "
                "other; name the towers in one section"
            )
        yield from ready
        left = [section for section in left if section not in ready]


def _turns(
    events: Sequence[Event], stage: int, section: SectionWindows, readers: Sequence[Sequence[_Pass]]
) -> list[_Turn]:
    """The turns of all windows that have items, in the order in which they begin on a stage and its readers."""
    first, last = uses_of_windows([event.action for event in events], section.size, stage)
    begins = {window: events[index].start for window, index in first.items()}
    ends = {window: events[index].end for window, index in last.items()}
    in_order = sorted({w for windows in section.encoded.values() for w in windows}, key=lambda window: begins[window])
    if in_order != sorted(in_order, key=lambda window: ends[window]):
        raise ScheduleError(
            f"sections.{section.name}: the first stage ends micro-batches in another order than it begins them, and "
            "gradients would come back in another order than features go; use another kind of schedule"
        )
    needs = {window: sum(begins[other] < ends[window] for other in in_order) for window in in_order}
    for passes in readers:
        encoded = 0  # number of turns up to the last one that the reader has encoded
        for window, kind, starts, stops in passes:
            if window not in needs:
                continue  # the reader has items of other components
            begins[window], ends[window] = min(begins[window], starts), max(ends[window], stops)
            encoded = in_order.index(window) + 1 if kind is Kind.ENCODE else encoded
            needs[window] = max(needs[window], encoded)
    earliest = [*accumulate((begins[window] for window in reversed(in_order)), min)][::-1]
    latest = accumulate((ends[window] for window in in_order), max)
    return [*map(_Turn, in_order, earliest, latest, (needs[window] for window in in_order))]


def _heads(events: Sequence[Event], last: int, section: SectionWindows, turns: Sequence[_Turn]) -> Iterator[_Head]:
    """Yield the losses that a section computes, in the order of the last stage; ``events``: of its rank."""
    with_targets = {k for micro_batches in section.heads.values() for k in micro_batches}
    begins, ends = dict[int, float](), dict[int, float]()
    for event in events:
        for part in event.action.passes:
            if (part.stage, part.component) == (last, FOUNDATION) and part.micro_batch in with_targets:
                if part.kind is Kind.F:
                    begins[part.micro_batch] = event.end
                elif part.kind is not Kind.W:
                    ends[part.micro_batch] = event.start
    if [*begins] != sorted(begins):
        raise ScheduleError(
            f"sections.{section.name}: the last stage runs micro-batches in another order than the first one, and "
            "hidden states would come in another order than features go; use another kind of schedule"
        )
    for k, seconds in begins.items():
        yield _Head(k, seconds, ends[k], sum(turn.begins < seconds for turn in turns))


def _with_losses(row: list[Action], last: int, section: SectionWindows, peer: int) -> list[Action]:
    """Add the messages for the heads of a section to the actions of the last stage's rank."""
    with_messages: list[Action] = []
    for action in row:
        own = [part for part in action.passes if (part.stage, part.component) == (last, FOUNDATION)]
        receives, sends = [], []
        for part, decoder in (
            (part, name) for part in own for name, of in section.heads.items() if part.micro_batch in of
        ):
            if part.kind is Kind.F:
                sends.append(Action(Kind.SEND_F, None, part.micro_batch, peer, f"{decoder}{STATES}"))
            elif part.kind is not Kind.W:
                receives.append(Action(Kind.RECV_F, None, part.micro_batch, peer, f"{decoder}{LOSS}"))
        with_messages += [*receives, action, *sends]
    return with_messages


def _with_messages(
    row: list[Action], section: SectionWindows, components: Sequence[str], peer: int, stage: int
) -> list[Action]:
    """Add the messages of these components of a section to the actions of the rank of a stage, which reads them."""
    first, last = uses_of_windows(row, section.size, stage)
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    for component in components:
        for window in section.encoded[component]:
            receive = Action(Kind.RECV_F, micro_batch=window, peer=peer, component=component)
            before.setdefault(first[window], []).append(receive)
            if component in section.trained:
                after.setdefault(last[window], []).append(receive._replace(kind=Kind.SEND_B))
    return [step for i, action in enumerate(row) for step in (*before.get(i, ()), action, *after.get(i, ()))]


def _actions(
    section: SectionWindows,
    stage: int,
    passes: Sequence[_Pass],
    peers: Mapping[str, int],
    row_of: Mapping[str, range],
    trained: frozenset[str],
) -> list[Action]:
    """Return the actions of a section's ranks.

    ``stage``: the one whose ranks they are; all stages run the same passes in one order. ``passes``: what it encodes,
    in order. ``peers``: component -> the list of those who read its features; and of the foundation's last stage.
    ``row_of``: component -> the lists of its section. ``trained``: components of all sections that have a backward.
    """
    actions: list[Action] = []
    ahead = [Action(Kind.ENCODE, None, w, None, component) for component, ws in section.upcoming.items() for w in ws]
    ahead.sort(key=lambda action: action.micro_batch or 0)
    for window, kind, *_ in passes:
        if kind is Kind.HEAD:
            actions += _actions_of_heads(section, window, peers[FOUNDATION])
        for component in _coded(section, window, kind):
            row, read = row_of[component][stage], section.reads.get(component)
            encode = section.passes_of(component, window, stage)[kind is Kind.ENCODE_B]
            inputs = [Action(Kind.RECV_F, stage, window, row - 1, component)] if stage else []
            if not stage and read is not None:
                inputs = [Action(Kind.RECV_F, None, window, row_of[read][-1], read)]
            output = Action(Kind.SEND_F, stage, window, row + 1, component)
            if stage == section.num_stages - 1:
                output = output._replace(stage=None, peer=peers[component])
            if kind is Kind.ENCODE:
                actions += [*inputs, *([] if section.is_encoded else [encode]), output]
            else:
                back = [message._replace(kind=Kind.SEND_B) for message in inputs if message.component in trained]
                actions += [output._replace(kind=Kind.RECV_B), encode, *back]
        actions += ahead[:1]  # between two messages, each of which waits until the first stage has room for it
        del ahead[:1]
    return [*chain.from_iterable((*before, a, *after) for before, a, after in with_weights([*actions, *ahead]))]


def _coded(section: SectionWindows, window: int, kind: Kind) -> list[str]:
    """The components that encode in a pass, or have a backward in it."""
    if kind is Kind.HEAD:
        return []
    return [name for name in section.components_of(window) if kind is Kind.ENCODE or name in section.trained]


def _predicting(section: SectionWindows, micro_batch: int) -> list[str]:
    """The decoders whose losses a section computes in a micro-batch."""
    return [decoder for decoder, micro_batches in section.heads.items() if micro_batch in micro_batches]


def _actions_of_heads(section: SectionWindows, micro_batch: int, peer: int) -> Iterator[Action]:
    """Yield the actions of the losses of a micro-batch; ``peer``: the list of the last stage."""
    for decoder in _predicting(section, micro_batch):
        states = Action(Kind.RECV_F, None, micro_batch, peer, f"{decoder}{STATES}")
        yield states
        yield Action(Kind.HEAD, None, micro_batch, component=decoder)
        yield states._replace(kind=Kind.SEND_F, component=f"{decoder}{LOSS}")


class _Losses:
    """The losses that a section has not computed yet."""

    def __init__(self, heads: Iterable[_Head]) -> None:
        self.left = deque(heads)  # those of which it is not known yet when they begin
        self._known: deque[tuple[float, _Head]] = deque()

    def learn(self, encoded: int, late: float) -> None:
        """Take the losses for which enough turns are encoded; the last stage is ``late`` seconds late."""
        while self.left and encoded >= self.left[0].needs:
            self._known.append((self.left[0].begins + late, self.left.popleft()))

    def next_at(self, free: float) -> float:
        """Return when the next one can begin, if the section is free from then on."""
        return max(free, self._known[0][0]) if self._known else float("inf")

    def pop(self) -> _Head:
        """Return the next one."""
        return self._known.popleft()[1]


def _order(
    section: SectionWindows,
    turns: list[_Turn],
    heads: Iterable[_Head],
    encoding: Callable[[str, int], float],
    limiting: SectionWindows,
) -> Iterator[_Pass]:
    """Yield the windows that a section encodes, and runs the heads and the backward of, in order.

    The first stage begins a turn when its features are there, and the last one a backward when its loss is; if they are
    late, everything after it is as much later.
    """
    losses = _Losses(heads)
    late, free, kept = 0.0, 0.0, 0
    begins = [0.0] * section.slots  # of the encoded windows, as they become known; before them, there is room
    ready: list[tuple[float, int]] = []  # ends of turns with a trained component, and their indices
    is_trained = [bool(section.trained.intersection(section.components_of(turn.window))) for turn in turns]
    unknown = [*compress(range(len(turns)), is_trained)]
    while True:
        encoded = len(begins) - section.slots
        while unknown and encoded >= turns[unknown[0]].needs:  # then its end is known
            heapq.heappush(ready, (turns[unknown[0]].ends + late, unknown[0]))
            del unknown[0]
        losses.learn(encoded, late)
        can_encode = encoded < len(turns) and (kept < limiting.keeps or not is_trained[encoded])
        forward_at = max(free, begins[encoded]) if can_encode else float("inf")
        backward_at = max(free, ready[0][0]) if ready else float("inf")
        head_at = losses.next_at(free)
        if forward_at == backward_at == head_at == float("inf"):
            break
        if head_at <= min(forward_at, backward_at):
            head = losses.pop()
            free = head_at + 3 * _seconds(encoding, head.micro_batch, _predicting(section, head.micro_batch))
            late = max(late, free - head.ends)
            yield _Pass(head.micro_batch, Kind.HEAD, head_at, free)
        elif forward_at <= backward_at:
            turn = turns[encoded]
            seconds = _seconds(encoding, turn.window, section.components_of(turn.window))
            free = forward_at + (0.0 if section.is_encoded else seconds)
            late = max(late, free - turn.begins)
            begins.append(turn.begins + late)
            kept += is_trained[encoded]
            yield _Pass(turn.window, Kind.ENCODE, forward_at, free)
        else:
            window = turns[heapq.heappop(ready)[1]].window
            trained = filter(section.trained.__contains__, section.components_of(window))
            free = backward_at + _seconds(encoding, window, trained) * (3 if section.encode_twice else 2)
            kept -= 1
            yield _Pass(window, Kind.ENCODE_B, backward_at, free)
    if encoded < len(turns) or [*unknown, *losses.left]:
        raise ScheduleError(
            f"sections.{limiting.name}.in_flight: found {limiting.in_flight}, but the first stage needs the features "
            "of more windows before the first backward can run: the section would wait for ever; allow more, or set "
            "encode_twice"
        )


def _seconds(encoding: Callable[[str, int], float], window: int, components: Iterable[str]) -> float:
    return sum(encoding(component, window) for component in components)
