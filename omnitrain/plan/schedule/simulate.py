"""Run a schedule in time, without a device: when does each action start, and who waits for whom?"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import COLLECTIVES, COMPUTE, RECEIVE_FOR, RECEIVES, SENDS, Action, Kind, Schedule

Seconds = Any  # float; int or Fraction where a result has to be exact
Durations = Callable[[Action], Seconds] | Mapping[Kind, Seconds] | Mapping[tuple[Kind, int], Seconds]
_Fact = tuple[Any, ...]  # something that becomes true when an action ends: (kind, stage, micro-batch, component)

# Pass -> the send that brings its input from another stage, and the pass there that makes it.
_INPUTS = {Kind.F: (Kind.SEND_F, Kind.F), Kind.B: (Kind.SEND_B, Kind.I), Kind.I: (Kind.SEND_B, Kind.I)}
_MADE_BY = {Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.I}


@dataclass(frozen=True)
class MessageCost:
    """What a message between two ranks costs."""

    latency: Seconds = 0  # seconds from the end of a send to the arrival
    bandwidth: Seconds = 1  # bytes per second. A rank sends one message at a time
    message_bytes: Callable[[Action], Seconds] = lambda _: 0  # bytes of the message that a ``SEND`` sends


class Event(NamedTuple):
    """An action in time."""

    action: Action
    start: Seconds  # seconds from the start of the step
    end: Seconds  # seconds from the start of the step; of a send, when the message has arrived
    exposed: Seconds = 0  # of an action that computes: seconds for which it waited for data or weights on their way


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]  # ``[ranks][actions]``, one for each action of the schedule

    @cached_property
    def makespan(self) -> Seconds:
        """Seconds from the start to the end of the last action."""
        return max((event.end for row in self.events for event in row), default=0)

    def computing(self, rank: int) -> list[Event]:
        """Return the events in which a rank computes."""
        return [event for event in self.events[rank] if event.action.computes]

    def idle(self, rank: int) -> Seconds:
        """Seconds of the step in which a rank does not compute."""
        return self.makespan - sum(event.end - event.start for event in self.computing(rank))

    @property
    def bubble(self) -> float:
        """Share of the step in which ranks do not compute, mean over ranks."""
        ranks = range(self.schedule.num_ranks)
        return float(sum(map(self.idle, ranks)) / self.makespan / len(ranks)) if self.makespan else 0.0

    def exposed(self, rank: int) -> Seconds:
        """Seconds for which a rank does not compute because data or weights are on their way, or gradients reduced."""
        computing = self.computing(rank)
        last = max((event.end for event in self.events[rank]), default=0)
        return sum(event.exposed for event in computing) + (last - computing[-1].end if computing else 0)


@dataclass(frozen=True)
class Wait:
    """A rank that does not get past an action."""

    rank: int
    index: int  # position of the action in the rank's list
    action: Action
    needs: str  # what it waits for, as text
    # the action it waits for, at ``needed_index`` of rank ``needed_rank``; None: no rank has it
    needed_action: Action | None = None
    needed_rank: int = -1
    needed_index: int = -1

    def __str__(self) -> str:
        here = f"rank {self.rank} waits at action {self.index}, {self.action}, for {self.needs}"
        if self.needed_action is None:
            return f"{here}, which no rank does"
        whose = "this rank" if self.needed_rank == self.rank else f"rank {self.needed_rank}"
        return f"{here}, action {self.needed_index} of {whose}"


class DeadlockError(ScheduleError):
    """Ranks wait for each other in a circle (``waits``), or one for an action that no rank has."""

    def __init__(self, waits: tuple[Wait, ...]) -> None:
        self.waits = waits
        super().__init__("the schedule stops: " + "; ".join(map(str, waits)))


def simulate(
    schedule: Schedule, durations: Durations, link: MessageCost | None = None, *, slots: int | None = None
) -> Timeline:
    """Run a lowered schedule in time, or forwards and backwards only: then results are at the next stage at once.

    A rank takes its actions in order. Forwards, backwards and collectives over all pipeline ranks hold its compute
    stream. Sends, gathers of weights and reductions run on its communication stream, one at a time, and hold nobody but
    the actions that need their result. Receives take no time.

    ``durations``: seconds of an action, as a function or by kind or (kind, stage). By default ``B`` takes as long as
    ``I`` and ``W``, and an overlap as both parts; ``F``, ``I`` and ``W`` are required, and all else takes no time.
    ``slots``: number of messages of one direction and kind between two ranks that may be sent before their receive is
    posted; a rank waits at the next send. 0: as NCCL does at worst. None: any number. Raises DeadlockError: some ranks
    never come to their end; ScheduleError: a duration is missing.
    """
    return _Run(schedule, _duration(durations), link or MessageCost(), slots).timeline()


def _duration(durations: Durations) -> Callable[[Action], Seconds]:
    if not isinstance(durations, Mapping):
        return durations
    table: Mapping[Any, Seconds] = durations

    def of(action: Action) -> Seconds:
        for key in ((action.kind, action.stage), action.kind):
            if key in table:
                return table[key]
        if action.kind is Kind.OVERLAP_F_B:
            return sum(map(of, action.parts))
        if action.kind is Kind.B:
            return of(action._replace(kind=Kind.I)) + of(action._replace(kind=Kind.W))
        if action.kind in COMPUTE:
            raise ScheduleError(f"no duration for {action}; durations are given for {', '.join(map(str, table))}")
        return 0

    return of


class _Run:
    """The state of a simulation: facts that became true, and ranks that wait for facts."""

    def __init__(self, schedule: Schedule, duration: Callable[[Action], Seconds], link: MessageCost, slots: int | None):
        self.schedule, self.duration, self.link = schedule, duration, link
        self.posted_before = {} if slots is None else _receives_before_sends(schedule, slots)
        self.has_messages = any(
            action.kind in SENDS | RECEIVES and action.stage is not None for row in schedule.actions for action in row
        )
        self.events: list[list[Event]] = [[] for _ in schedule.actions]
        # When the streams of each rank, for computation and for communication, are free
        self.free: list[Seconds] = [0] * schedule.num_ranks
        self.link_free: list[Seconds] = [0] * schedule.num_ranks
        self.facts: dict[_Fact, Seconds] = {}  # what has become true -> when
        self.waiting: dict[_Fact, list[int]] = defaultdict(list)  # what is not true yet -> ranks that wait for it
        self.gathered: dict[tuple[int, str, int | None], Seconds] = {}  # rank, stage -> when its weights are there
        self.ready = deque(range(schedule.num_ranks))

    def timeline(self) -> Timeline:
        while self.ready:
            rank = self.ready.popleft()
            row = self.schedule.actions[rank]
            while (index := len(self.events[rank])) < len(row):
                if self._is_collective(rank, row[index]):
                    self._become_true((*_fact(row[index]), rank), self.free[rank])
                needs = list(self._needs(rank, row[index]))
                missing = next((fact for fact in needs if fact not in self.facts), None)
                if missing is not None:
                    self.waiting[missing].append(rank)
                    break
                self._run(rank, row[index], needs)
        if stuck := {rank: fact for fact, ranks in self.waiting.items() for rank in ranks}:
            raise DeadlockError(self._circle(stuck))
        return Timeline(self.schedule, tuple(map(tuple, self.events)))

    def _become_true(self, fact: _Fact, seconds: Seconds) -> None:
        self.facts.setdefault(fact, seconds)
        self.ready.extend(self.waiting.pop(fact, ()))

    def _needs(self, rank: int, action: Action) -> Iterator[_Fact]:
        """Yield the facts that have to be true before an action can start."""
        if action.kind in SENDS:
            if action.stage is not None:
                yield _fact(action, _MADE_BY[action.kind])
            if posted := self.posted_before.get((rank, action)):
                yield posted
        elif action.kind in RECEIVES and action.stage is None:
            yield _fact(action, Kind.SEND_F if action.kind is Kind.RECV_F else Kind.SEND_B)
        elif self._is_collective(rank, action):
            yield from ((*_fact(action), other) for other in range(self.schedule.num_pipeline_ranks))
        for part in action.passes:
            if part.kind is Kind.W:
                yield _fact(part, Kind.I)
                continue
            if part.kind is not Kind.F:
                yield _fact(part, Kind.F)
            yield from self._arrivals(rank, part)

    def _is_collective(self, rank: int, action: Action) -> bool:
        """Whether all pipeline ranks run the action together; a section encodes by itself."""
        return action.kind in COLLECTIVES and rank < self.schedule.num_pipeline_ranks

    def _arrivals(self, rank: int, part: Action) -> Iterator[_Fact]:
        """Yield the actions that bring a forward or backward its input from another stage."""
        send, made_by = _INPUTS[part.kind]
        if (source := self.schedule.source_of(part)) is None:
            return
        assert source.stage is not None
        if not self.has_messages or self.schedule.staged[source.component].ranks[source.stage] == rank:
            yield _fact(source, made_by)
        else:
            yield _fact(part, RECEIVE_FOR[part.kind])
            yield _fact(source, send)

    def _run(self, rank: int, action: Action, needs: list[_Fact]) -> None:
        """Run an action whose needs are all true."""
        free = self.free[rank]
        can_start = max([free, *(self.facts[fact] for fact in needs)])
        if action.computes:
            stages = [(rank, part.component, part.stage) for part in action.passes]
            start = max([can_start, *(self.gathered[stage] for stage in stages if stage in self.gathered)])
            made = max([free, *map(self._made, needs)])
            self.free[rank] = end = start + self.duration(action)
            exposed = start - made if action.kind in COMPUTE else 0
            self.events[rank].append(Event(action, start, end, exposed))
        elif action.kind in RECEIVES:  # a message of a section is waited for here
            self.free[rank] = end = can_start
            self.events[rank].append(Event(action, end, end))
        else:
            end = self._communicate(rank, action, can_start)
        for fact in _facts_of(action):
            self._become_true(fact, end)

    def _made(self, fact: _Fact) -> Seconds:
        """Return when the data of a need were computed: of a message, before its sender began to send it."""
        return self.facts[(_MADE_BY[fact[0]], *fact[1:])] if fact[0] in SENDS else self.facts[fact]

    def _communicate(self, rank: int, action: Action, issued: Seconds) -> Seconds:
        if action.kind in SENDS and self.posted_before:
            self.free[rank] = issued  # the rank waits at its send until the receive is posted
        start = max(issued, self.link_free[rank])
        takes, latency = self.duration(action), 0
        if action.kind in SENDS:
            num_bytes, latency = self.link.message_bytes(action), self.link.latency
            takes += num_bytes / self.link.bandwidth if num_bytes else 0
        self.link_free[rank] = start + takes
        self.events[rank].append(Event(action, start, start + takes + latency))
        if action.kind is Kind.UNSHARD:
            self.gathered[rank, action.component, action.stage] = start + takes
        return start + takes + latency

    def _circle(self, stuck: dict[int, _Fact]) -> tuple[Wait, ...]:
        """Follow, from a rank that is stuck, the rank that it waits for, until a rank comes twice."""
        places = _places(self.schedule)
        waits: dict[int, Wait] = {}
        rank = min(stuck)
        while rank not in waits:
            index = len(self.events[rank])
            action, (kind, stage, micro_batch, component, *other) = self.schedule.actions[rank][index], stuck[rank]
            if stuck[rank] not in places:
                text = f"{Action(kind, stage, micro_batch, component=component)}"
                return (Wait(rank, index, action, f"{text} of rank {other[0]}" if other else text),)
            needed_rank, needed_index = places[stuck[rank]]
            needed = self.schedule.actions[needed_rank][needed_index]
            waits[rank] = Wait(rank, index, action, str(needed), needed, needed_rank, needed_index)
            rank = needed_rank
        chain = tuple(waits.values())
        return chain[list(waits).index(rank) :]


def _fact(action: Action, kind: Kind | None = None) -> _Fact:
    return (kind or action.kind, action.stage, action.micro_batch, action.component)


def _facts_of(action: Action) -> Iterator[_Fact]:
    """Yield the facts that become true when an action ends."""
    for part in action.passes or (action,):
        if part.kind is Kind.B:
            yield _fact(part, Kind.I)
        yield _fact(part)


def _places(schedule: Schedule) -> dict[_Fact, tuple[int, int]]:
    """Return the rank and the index of the first action that makes each fact true."""
    places: dict[_Fact, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            for fact in (*_facts_of(action), (*_fact(action), rank)):
                places.setdefault(fact, (rank, index))
    return places


def _receives_before_sends(schedule: Schedule, slots: int) -> dict[tuple[int, Action], _Fact]:
    """Return, for each send, the receive that has to be posted before it ends.

    Features of a section have slots of their own, and a receive is posted when the one ``slots`` before it was taken.
    Gradients and hidden states for a section never wait, as their receives are posted when it has sent the features;
    nor do losses, for which they are posted when the hidden states were sent.
    """
    channels: dict[tuple[int, Kind, int | None, str], list[Action]] = defaultdict(list)
    posted: dict[tuple[int, Action], _Fact] = {}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in SENDS and (action.stage is not None or action.kind is Kind.SEND_F):
                channel = channels[rank, action.kind, action.peer, action.component]
                channel.append(action)
                ahead = slots if action.stage is not None else schedule.slots.get(action.component, len(channel))
                if len(channel) > ahead:
                    posted[rank, action] = _fact(channel[len(channel) - 1 - ahead].receive(rank))
    return posted
