"""Run a schedule in time, without a device: when does each action start, and who waits for whom?"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import COLLECTIVES, COMPUTE, RECEIVES, SENDS, Action, Channel, Kind, Schedule

Seconds = Any  # float; int or Fraction where a result has to be exact
Durations = Callable[[Action], Seconds] | Mapping[Kind, Seconds] | Mapping[tuple[Kind, int], Seconds]
_Fact = tuple[Any, ...]  # something that becomes true when an action ends: (kind, stage, micro-batch, component)


class Stream(StrEnum):
    """Where an action runs on its rank; the two streams run side by side."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(frozen=True)
class Link:
    """What a message between two ranks costs.

    Attributes:
        latency: seconds from the end of a send to the arrival.
        bandwidth: bytes per second. A rank sends one message at a time.
        message_bytes: bytes of the message that a ``SEND`` sends.
    """

    latency: Seconds = 0
    bandwidth: Seconds = 1
    message_bytes: Callable[[Action], Seconds] = lambda _: 0


class Event(NamedTuple):
    """An action in time.

    Attributes:
        action: the action.
        stream: where it ran.
        start: seconds from the start of the step.
        end: seconds from the start of the step; of a send, when the message has arrived.
        exposed: of an action that computes: seconds for which it waited for data or weights on their way.
        cause: rank and index of the event whose end let this one start, or None: it started with the step.
    """

    action: Action
    stream: Stream
    start: Seconds
    end: Seconds
    exposed: Seconds
    cause: tuple[int, int] | None


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        schedule: the schedule that ran.
        events: ``[ranks][actions]``, one for each action of the schedule.
    """

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]

    @cached_property
    def makespan(self) -> Seconds:
        """Seconds from the start to the end of the last action."""
        return max((event.end for row in self.events for event in row), default=0)

    def busy(self, rank: int) -> Seconds:
        """Seconds in which a rank computes."""
        return sum(event.end - event.start for event in self._computing(rank))

    def idle(self, rank: int) -> Seconds:
        """Seconds of the step in which a rank does not compute."""
        return self.makespan - self.busy(rank)

    @property
    def bubble(self) -> float:
        """Share of the step in which ranks do not compute, mean over ranks."""
        ranks = range(self.schedule.num_ranks)
        return float(sum(map(self.idle, ranks)) / self.makespan / len(ranks)) if self.makespan else 0.0

    def idle_inside(self, rank: int) -> Seconds:
        """Seconds between a rank's first and last computation in which it does not compute."""
        computing = self._computing(rank)
        return computing[-1].end - computing[0].start - self.busy(rank) if computing else 0

    def exposed(self, rank: int) -> Seconds:
        """Seconds for which a rank does not compute because data or weights are on their way, or gradients reduced."""
        computing = self._computing(rank)
        last = max((event.end for event in self.events[rank]), default=0)
        return sum(event.exposed for event in computing) + (last - computing[-1].end if computing else 0)

    def critical_path(self) -> tuple[Event, ...]:
        """Return the chain of events that sets the makespan, each started by the end of the one before it."""
        ends = {(rank, i): event.end for rank, row in enumerate(self.events) for i, event in enumerate(row)}
        at: tuple[int, int] | None = max(ends, key=lambda place: ends[place], default=None)
        path: list[Event] = []
        while at is not None:
            path.append(self.events[at[0]][at[1]])
            at = path[-1].cause
        return tuple(reversed(path))

    def _computing(self, rank: int) -> list[Event]:
        return [event for event in self.events[rank] if event.stream is Stream.COMPUTE]


@dataclass(frozen=True)
class Wait:
    """A rank that does not get past an action.

    Attributes:
        rank: the rank.
        index: position of the action in the rank's list.
        action: the action.
        needs: what it waits for, as text.
        needed_action: the action it waits for, or None: no rank has such an action.
        needed_rank: rank of ``needed_action``.
        needed_index: position of ``needed_action`` in that rank's list.
    """

    rank: int
    index: int
    action: Action
    needs: str
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
    """Ranks wait for each other, or for an action that no rank has.

    Attributes:
        waits: the ranks of the circle, each waiting for the next, or the one rank that waits for nothing.
    """

    def __init__(self, waits: tuple[Wait, ...]) -> None:
        self.waits = waits
        super().__init__("the schedule stops: " + "; ".join(map(str, waits)))


def simulate(
    schedule: Schedule,
    durations: Durations,
    link: Link | None = None,
    *,
    slots: int | None = None,
    connected: Collection[Channel] | None = None,
) -> Timeline:
    """Run a schedule in time.

    A rank takes its actions in order. Forwards, backwards and collectives over all pipeline ranks hold its compute
    stream. Sends, gathers of weights and reductions run on its communication stream, one at a time, and hold nobody
    but the actions that need their result. Receives take no time.

    Args:
        schedule: a lowered schedule (:func:`~omnitrain.plan.schedule.lower.lower`), or forwards and backwards only:
            then results are at the next stage at once.
        durations: seconds of an action: a function, or a mapping by kind or by (kind, stage). Where a mapping says
            nothing, ``B`` takes as long as ``I`` and ``W``, an overlap as long as both parts, ``F``, ``I`` and ``W``
            are required, and all else takes no time.
        link: what messages cost; None: nothing.
        slots: number of messages of one direction and kind between two ranks that may be sent before their receive is
            posted; a rank waits at the next send. 0: as NCCL does at worst. None: any number.
        connected: the channels whose ranks are connected before the step. NCCL connects two ranks at the first message
            of a communicator: who comes first waits there, on the host, until the other one comes. None: all.

    Raises:
        DeadlockError: some ranks never come to their end.
        ScheduleError: a duration is missing.
    """
    return _Run(schedule, _duration(durations), link or Link(), slots, connected).timeline()


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


class _Reached(NamedTuple):
    """When something became true, and the event that made it true."""

    time: Seconds
    event: tuple[int, int] | None


class _Run:
    """The state of a simulation: how far each rank is, and what has become true."""

    def __init__(
        self,
        schedule: Schedule,
        duration: Callable[[Action], Seconds],
        link: Link,
        slots: int | None,
        connected: Collection[Channel] | None,
    ) -> None:
        self.schedule, self.duration, self.link = schedule, duration, link
        self.connects_at = {} if connected is None else _first_messages(schedule, connected)
        self.posted_before = {} if slots is None else _receives_before_sends(schedule, slots)
        self.has_messages = any(
            action.kind in SENDS | RECEIVES and action.stage is not None for row in schedule.actions for action in row
        )
        self.events: list[list[Event]] = [[] for _ in schedule.actions]
        self.compute_free = [_Reached(0, None) for _ in schedule.actions]
        self.communication_free = [_Reached(0, None) for _ in schedule.actions]
        self.facts: dict[_Fact, _Reached] = {}
        self.gathered: dict[tuple[int, int | None], _Reached] = {}

    def timeline(self) -> Timeline:
        waiting: dict[_Fact, list[int]] = defaultdict(list)
        ready = deque(range(self.schedule.num_ranks))
        while ready:
            rank = ready.popleft()
            row = self.schedule.actions[rank]
            while (index := len(self.events[rank])) < len(row):
                if self._is_collective(rank, row[index]):
                    self._become_true((*_fact(row[index]), rank), self.compute_free[rank], waiting, ready)
                if channel := self.connects_at.get((rank, index)):
                    self._become_true((*channel, rank), self.compute_free[rank], waiting, ready)
                needs = list(self._needs(rank, row[index]))
                if channel is not None:
                    needs.append((*channel, channel.other(rank)))
                missing = next((fact for fact in needs if fact not in self.facts), None)
                if missing is not None:
                    waiting[missing].append(rank)
                    break
                for fact, reached in self._run(rank, row[index], [self.facts[fact] for fact in needs]):
                    self._become_true(fact, reached, waiting, ready)
        if waiting := {fact: ranks for fact, ranks in waiting.items() if ranks}:
            raise DeadlockError(self._circle({rank: fact for fact, ranks in waiting.items() for rank in ranks}))
        return Timeline(self.schedule, tuple(map(tuple, self.events)))

    def _become_true(self, fact: _Fact, reached: _Reached, waiting: dict[_Fact, list[int]], ready: deque[int]) -> None:
        self.facts.setdefault(fact, reached)
        ready.extend(waiting.pop(fact, ()))

    def _needs(self, rank: int, action: Action) -> Iterator[_Fact]:
        """Yield what has to be true before an action can start."""
        if action.kind in SENDS:
            if action.stage is not None:
                yield _fact(action, Kind.F if action.kind is Kind.SEND_F else Kind.I)
            if posted := self.posted_before.get((rank, action)):
                yield posted
        elif action.kind in RECEIVES and action.stage is None:
            yield _fact(action, Kind.SEND_F if action.kind is Kind.RECV_F else Kind.SEND_B)
        elif self._is_collective(rank, action):
            yield from ((*_fact(action), other) for other in range(self.schedule.num_pipeline_ranks))
        for part in action.passes:
            if part.kind is Kind.F:
                yield from self._arrivals(rank, part, Kind.RECV_F, Kind.SEND_F, -1)
            elif part.kind is Kind.W:
                yield _fact(part, Kind.I)
            else:
                yield _fact(part, Kind.F)
                yield from self._arrivals(rank, part, Kind.RECV_B, Kind.SEND_B, 1)

    def _is_collective(self, rank: int, action: Action) -> bool:
        """Whether all pipeline ranks run the action together; a section encodes by itself."""
        return action.kind in COLLECTIVES and rank < self.schedule.num_pipeline_ranks

    def _arrivals(self, rank: int, part: Action, receive: Kind, send: Kind, step: int) -> Iterator[_Fact]:
        """Yield what brings a forward or backward its input from the stage before it."""
        assert part.stage is not None
        source = part._replace(stage=part.stage + step)
        if not 0 <= part.stage + step < self.schedule.num_stages:
            return
        if not self.has_messages or self.schedule.stage_ranks[part.stage + step] == rank:
            yield _fact(source, Kind.F if part.kind is Kind.F else Kind.I)
        else:
            yield _fact(part, receive)
            yield _fact(source, send)

    def _run(self, rank: int, action: Action, needs: list[_Reached]) -> Iterator[tuple[_Fact, _Reached]]:
        """Run an action whose needs are all true, and yield what becomes true."""
        if action.kind in COMPUTE or action.kind in COLLECTIVES:
            end = self._compute(rank, action, needs)
            self.compute_free[rank] = end
        elif action.kind in RECEIVES:
            now = _latest([self.compute_free[rank], *needs])  # a message of a section is waited for here
            self.compute_free[rank] = now
            self.events[rank].append(Event(action, Stream.COMMUNICATION, now.time, now.time, 0, now.event))
            end = _Reached(now.time, (rank, len(self.events[rank]) - 1))
        else:
            end = self._communicate(rank, action, needs)
        for part in action.passes or (action,):
            if part.kind is Kind.B:
                yield _fact(part, Kind.I), end
            yield _fact(part), end

    def _compute(self, rank: int, action: Action, needs: list[_Reached]) -> _Reached:
        free = self.compute_free[rank]
        weights = [self.gathered[rank, part.stage] for part in action.passes if (rank, part.stage) in self.gathered]
        start = _latest([free, *needs, *weights])
        made = [free.time, *(self._made(need) for need in needs)]
        exposed = start.time - max(made) if action.kind in COMPUTE else 0
        end = start.time + self.duration(action)
        self.events[rank].append(Event(action, Stream.COMPUTE, start.time, end, exposed, start.event))
        return _Reached(end, (rank, len(self.events[rank]) - 1))

    def _made(self, need: _Reached) -> Seconds:
        """Return when the data of a need were computed: of a message, when its sender began to send it or earlier."""
        if need.event is None:
            return need.time
        event = self.events[need.event[0]][need.event[1]]
        if event.action.kind not in SENDS:
            return need.time
        return self.facts[_fact(event.action, Kind.F if event.action.kind is Kind.SEND_F else Kind.I)].time

    def _communicate(self, rank: int, action: Action, needs: list[_Reached]) -> _Reached:
        issued = _latest([self.compute_free[rank], *needs])
        if action.kind in SENDS and self.posted_before:
            self.compute_free[rank] = issued  # the rank waits at its send until the receive is posted
        start = _latest([issued, self.communication_free[rank]])
        takes, latency = self.duration(action), 0
        if action.kind in SENDS:
            takes += self.link.message_bytes(action) / self.link.bandwidth if self.link.message_bytes(action) else 0
            latency = self.link.latency
        here = (rank, len(self.events[rank]))
        end = start.time + takes + latency
        self.events[rank].append(Event(action, Stream.COMMUNICATION, start.time, end, 0, start.event))
        self.communication_free[rank] = _Reached(start.time + takes, here)
        if action.kind is Kind.UNSHARD:
            self.gathered[rank, action.stage] = _Reached(end, here)
        return _Reached(end, here)

    def _circle(self, stuck: dict[int, _Fact]) -> tuple[Wait, ...]:
        """Follow, from a rank that is stuck, the rank that it waits for, until a rank comes twice."""
        places = _places(self.schedule)
        waits: dict[int, Wait] = {}
        rank = min(stuck)
        while rank not in waits:
            index = len(self.events[rank])
            action, fact = self.schedule.actions[rank][index], stuck[rank]
            if fact not in places:
                return (Wait(rank, index, action, _text(fact)),)
            needed_rank, needed_index = places[fact]
            needed = self.schedule.actions[needed_rank][needed_index]
            connects = fact[0] in SENDS and len(fact) > len(_fact(needed))
            text = f"{needed} to connect the two ranks" if connects else str(needed)
            waits[rank] = Wait(rank, index, action, text, needed, needed_rank, needed_index)
            rank = needed_rank
        chain = tuple(waits.values())
        return chain[list(waits).index(rank) :]


def _fact(action: Action, kind: Kind | None = None) -> _Fact:
    return (kind or action.kind, action.stage, action.micro_batch, action.component)


def _text(fact: _Fact) -> str:
    kind, stage, micro_batch, component, *rank = fact
    action = Action(kind, stage, micro_batch, component=component)
    return f"{action} of rank {rank[0]}" if rank else str(action)


def _latest(times: Iterable[_Reached]) -> _Reached:
    return max(times, key=lambda reached: reached.time)


def _places(schedule: Schedule) -> dict[_Fact, tuple[int, int]]:
    """Return the rank and the index of the first action that makes each fact true."""
    places: dict[_Fact, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            for part in action.passes or (action,):
                places.setdefault(_fact(part), (rank, index))
                if part.kind is Kind.B:
                    places.setdefault(_fact(part, Kind.I), (rank, index))
                if part.kind in COLLECTIVES:
                    places.setdefault((*_fact(part), rank), (rank, index))
    places |= {(*channel, place[0]): place for place, channel in _first_messages(schedule, ()).items()}
    return places


def _first_messages(schedule: Schedule, connected: Collection[Channel]) -> dict[tuple[int, int], Channel]:
    """Return rank and index of the first message of each channel that is not connected, at both of its ends."""
    found: dict[tuple[Channel, int], tuple[int, int]] = {}
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            if action.kind in SENDS | RECEIVES and (channel := action.channel(rank)) not in connected:
                found.setdefault((channel, rank), (rank, index))
    return {place: channel for (channel, _), place in found.items()}


def _receives_before_sends(schedule: Schedule, slots: int) -> dict[tuple[int, Action], _Fact]:
    """Return, for each send, the receive that has to be posted before it ends.

    Features of a section have slots of their own, and a receive is posted when the one ``slots`` before it was taken.
    Gradients for a section never wait: their receives are posted when the section has sent the features.
    """
    channels: dict[tuple[int, Kind, int | None, str], list[Action]] = defaultdict(list)
    posted: dict[tuple[int, Action], _Fact] = {}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in SENDS and (action.stage is not None or action.kind is Kind.SEND_F):
                channel = channels[rank, action.kind, action.peer, action.component]
                channel.append(action)
                ahead = slots if action.stage is not None else schedule.slots[action.component]
                if len(channel) > ahead:
                    posted[rank, action] = _fact(channel[len(channel) - 1 - ahead].receive(rank))
    return posted
