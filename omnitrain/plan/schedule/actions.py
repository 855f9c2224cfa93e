"""A pipeline schedule as data: for each pipeline rank, the list of actions that it runs in a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from omnitrain.errors import ScheduleError

FOUNDATION = "foundation"
# Behind the name of a decoder in a section: the hidden states for its head, and what comes back from there.
STATES, LOSS = ".states", ".loss"


class Kind(StrEnum):
    """What an action does. Values are the words of ``torch.distributed.pipelining``, where it has one."""

    F = "F"  # forward
    B = "B"  # backward: gradients of inputs and weights
    I = "I"  # noqa: E741  # the part of the backward that computes gradients of inputs
    W = "W"  # the part of the backward that computes gradients of weights
    OVERLAP_F_B = "OVERLAP_F_B"  # a forward and a backward that run side by side
    SEND_F = "SEND_F"  # the stage's output goes to the next stage
    RECV_F = "RECV_F"  # post the receive of the stage's input
    SEND_B = "SEND_B"  # the gradient of the stage's input goes to the stage before
    RECV_B = "RECV_B"  # post the receive of the gradient of the stage's output
    UNSHARD = "UNSHARD"  # gather the stage's weights
    RESHARD = "RESHARD"  # free the gathered weights
    REDUCE = "REDUCE_GRAD"  # reduce the stage's gradients over data parallel ranks
    ENCODE = "ENCODE"  # run encoders on this rank's items
    EXCHANGE = "EXCHANGE"  # features go to the ranks that need them
    ENCODE_B = "ENCODE_B"  # backward of the encoders
    HEAD = "HEAD"  # of a decoder in a section: its loss of hidden states that came, and their gradients
    OPTIMIZER = "OPTIMIZER"  # gradient norm and update


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
WEIGHTS = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE})
ENCODES = frozenset({Kind.ENCODE, Kind.EXCHANGE, Kind.ENCODE_B, Kind.HEAD})
COLLECTIVES = ENCODES | {Kind.OPTIMIZER}  # over all pipeline ranks

SEND_OF = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}
RECEIVE_OF = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}
RECEIVE_FOR = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}  # of its input

_KINDS = frozenset(kind.value for kind in Kind)
_ACTION = re.compile(r"(\d*)([A-Z_]+)(\d*)(?:[<>](\d+))?(?:@([^\s;()]+))?")
_OVERLAP = re.compile(r"\(([^()]+);([^()]+)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One action of a rank."""

    kind: Kind  # what it does
    # index of the stage. A ``SEND`` has the stage that sends, a ``RECV`` the stage that receives. None: the action
    # belongs to no stage (``ENCODE``, ``EXCHANGE``, ``ENCODE_B``, ``OPTIMIZER``, ``OVERLAP_F_B``, messages between
    # components)
    stage: int | None = None
    # index of the micro-batch; of encoders: the first one of the window. None: the action is done once in the step
    micro_batch: int | None = None
    peer: int | None = None  # pipeline rank at the other end of a ``SEND`` or ``RECV``, else None
    # the component whose stage it is, or that it encodes; of messages for a head: its decoder, with STATES or LOSS
    component: str = FOUNDATION
    parts: tuple[Action, ...] = ()  # of ``OVERLAP_F_B``, its forward and its backward, in this order; else empty

    def __str__(self) -> str:
        """``2F0``: forward of stage 2, micro-batch 0. ``2SEND_F0>3``: and its output to rank 3. See :meth:`parse`."""
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        text = f"{'' if self.stage is None else self.stage}{self.kind}"
        text += "" if self.micro_batch is None else str(self.micro_batch)
        if self.peer is not None:
            text += f"{'<' if self.kind in RECEIVES else '>'}{self.peer}"
        return text if self.component == FOUNDATION else f"{text}@{self.component}"

    @property
    def passes(self) -> tuple[Action, ...]:
        """The forwards and backwards that it computes: itself, both parts of an overlap, or none."""
        return self.parts or ((self,) if self.kind in COMPUTE else ())

    @property
    def computes(self) -> bool:
        """Whether it runs on the compute stream of its rank. Messages and gathers run beside it."""
        return self.kind in COMPUTE or self.kind in COLLECTIVES

    @property
    def owner(self) -> str:
        """The component that it is about; of messages for a head, its decoder."""
        return self.component.removesuffix(STATES).removesuffix(LOSS)

    def receive(self, sender: int) -> Action:
        """Return the receive that belongs to this send of rank ``sender``."""
        stage = None if self.stage is None else self.stage + (1 if self.kind is Kind.SEND_F else -1)
        return self._replace(kind=RECEIVE_OF[self.kind], stage=stage, peer=sender)

    @staticmethod
    def parse(text: str) -> Action:
        """Read an action: ``3B1``, ``0RECV_B2<1``, ``1UNSHARD``, ``(3F2;5B1)OVERLAP_F_B``, ``ENCODE0@vision``.

        Forwards, backwards and overlaps are written as by ``torch.distributed.pipelining``; others are a ScheduleError.
        """
        if overlap := _OVERLAP.fullmatch(text.strip()):
            return Action(Kind.OVERLAP_F_B, parts=tuple(map(Action.parse, overlap.groups())))
        match = _ACTION.fullmatch(text.strip())
        if match is None or match[2] not in _KINDS:
            raise ScheduleError(f"'{text}' is not an action; an action looks like 2F0, 2SEND_F0>3 or 1UNSHARD")
        stage, kind, micro_batch, peer, component = match.groups()
        return Action(Kind(kind), _number(stage), _number(micro_batch), _number(peer), component or FOUNDATION)


def _number(text: str | None) -> int | None:
    return int(text) if text else None


@dataclass(frozen=True)
class SectionWindows:
    """A section in a step: its ranks encode windows of micro-batches, one after the other."""

    name: str  # name of the section
    # component -> first micro-batches of the windows in which it has items; in the order in which the components of a
    # window encode
    encoded: Mapping[str, Sequence[int]] = field(hash=False)
    trained: frozenset[str]  # components that have a backward
    size: int  # number of micro-batches in a window
    slots: int  # number of messages of a component for which those who read them have room
    in_flight: int | None = None  # number of windows whose activations the section may keep; None: any number
    encode_twice: bool = False  # it keeps none, and its backwards repeat the forwards
    # its features were encoded in the step before; now they are only sent. Then nothing trains
    is_encoded: bool = False
    # component -> windows of the next step that it encodes in this one, counted on from those of this step
    upcoming: Mapping[str, Sequence[int]] = field(default_factory=dict, hash=False)
    # component of this section -> one of another section that it reads, in windows of equal size
    reads: Mapping[str, str] = field(default_factory=dict, hash=False)
    # decoder -> micro-batches in which it has targets. The last stage sends the section the hidden states from which
    # they are predicted; the section computes the loss, and sends it back with the gradients of these states
    heads: Mapping[str, Sequence[int]] = field(default_factory=dict, hash=False)
    at_end: bool = False  # whether the last stage reads its features, not the first one
    # number of stages of each of its components: the section has as many lists of actions. With several, a forward of a
    # stage is ``F``, and ``ENCODE`` is not used
    num_stages: int = 1

    @property
    def keeps(self) -> float:
        """Number of windows whose activations it may keep."""
        return float("inf") if self.in_flight is None or self.encode_twice else self.in_flight

    def components_of(self, window: int) -> list[str]:
        """Return the components that have items in a window."""
        return [component for component, windows in self.encoded.items() if window in windows]

    def passes_of(self, component: str, window: int, stage: int) -> tuple[Action, Action]:
        """Return the actions of a stage of a component that encode a window, and run its backward."""
        if self.num_stages > 1:
            forward = Action(Kind.F, stage, window, component=component)
            return forward, forward._replace(kind=Kind.B)
        encode = Action(Kind.ENCODE, None, window, component=component)
        return encode, encode._replace(kind=Kind.ENCODE_B)


def rows_of_sections(sections: Sequence[SectionWindows], first: int) -> dict[str, range]:
    """Return section -> the indices of its lists of actions, one for each of its stages, from ``first`` on."""
    ends = accumulate((section.num_stages for section in sections), initial=first)
    return {section.name: range(*rows) for section, rows in zip(sections, pairwise(ends), strict=True)}


class StagedNode(NamedTuple):
    """A component whose forwards and backwards are actions of its stages, as those of the foundation are."""

    component: str  # its name
    ranks: tuple[int, ...]  # ``[stages]``, the list of actions of each stage
    windows: tuple[int, ...]  # first micro-batches of the windows that it runs
    is_trained: bool = True  # whether it has backwards


@dataclass(frozen=True)
class Schedule:
    """For each pipeline rank the actions that it runs in a step, in order: of a generator, or with :func:`lower`."""

    actions: tuple[tuple[Action, ...], ...]  # ``[pipeline ranks]``, the actions of each rank
    stage_ranks: tuple[int, ...]  # ``[stages]``, the pipeline rank of each stage
    num_micro_batches: int  # number of micro-batches of the step
    # sections; after the pipeline ranks, ``actions`` has the list of each of them
    sections: tuple[SectionWindows, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Number of lists of actions: pipeline ranks, then sections."""
        return len(self.actions)

    @property
    def num_pipeline_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.actions) - sum(section.num_stages for section in self.sections)

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return len(self.stage_ranks)

    @cached_property
    def slots(self) -> Mapping[str, int]:
        """Component of a section -> number of messages with its features for which the first stage has room."""
        return {component: section.slots for section in self.sections for component in section.encoded}

    @cached_property
    def rows_of_sections(self) -> Mapping[str, range]:
        """Section -> the indices of its lists of actions, one for each of its stages."""
        return rows_of_sections(self.sections, self.num_pipeline_ranks)

    @cached_property
    def staged(self) -> Mapping[str, StagedNode]:
        """Component -> its stages: the foundation, and the components of sections with several stages."""
        nodes = [StagedNode(FOUNDATION, self.stage_ranks, tuple(range(self.num_micro_batches)))]
        nodes += [
            StagedNode(component, tuple(self.rows_of_sections[s.name]), tuple(windows), component in s.trained)
            for s in self.sections
            for component, windows in s.encoded.items()
            if s.num_stages > 1
        ]
        return {node.component: node for node in nodes}

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of the foundation on a rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def stage_reading(self, section: SectionWindows) -> int:
        """Return the stage that reads the features of a section."""
        return self.num_stages - 1 if section.at_end else 0

    def source_of(self, part: Action) -> Action | None:
        """Return the pass of the stage before or after whose result a pass needs, if any."""
        assert part.stage is not None
        stage = part.stage + (-1 if part.kind is Kind.F else 1)
        return part._replace(stage=stage) if 0 <= stage < len(self.staged[part.component].ranks) else None

    def send_of(self, part: Action) -> Action | None:
        """Return the send of a pass's result to another stage's rank; None: it stays there, or no stage needs it."""
        if part.kind is Kind.W or part.stage is None:
            return None
        stage, ranks = part.stage + (1 if part.kind is Kind.F else -1), self.staged[part.component].ranks
        if not 0 <= stage < len(ranks) or ranks[stage] == ranks[part.stage]:
            return None
        return part._replace(kind=SEND_OF[part.kind], peer=ranks[stage])

    @cached_property
    def senders(self) -> Mapping[Action, tuple[int, int]]:
        """Each receive -> the rank that sends its message, and the index of the send in that rank's list."""
        return {
            action.receive(rank): (rank, index)
            for rank, row in enumerate(self.actions)
            for index, action in enumerate(row)
            if action.kind in SENDS
        }

    @cached_property
    def messages_before(self) -> tuple[tuple[int, ...], ...]:
        """For each list, the number of sends and receives before each of its actions."""
        messages = [[action.kind in SENDS | RECEIVES for action in row] for row in self.actions]
        return tuple(tuple(accumulate(row, initial=0)) for row in messages)

    def with_actions(self, actions: Iterable[Iterable[Action]]) -> Schedule:
        """Return this schedule with other actions on the same stages and micro-batches."""
        return replace(self, actions=tuple(map(tuple, actions)))

    def peak_live(self) -> tuple[int, ...]:
        """Return, for each rank, how many (stage, micro-batch) have activations at most, from F to B or W."""
        changes = {Kind.F: 1, Kind.B: -1, Kind.W: -1}
        passes = ([part for action in row for part in action.passes] for row in self.actions)
        return tuple(max(accumulate((changes.get(part.kind, 0) for part in of_rank), initial=0)) for of_rank in passes)


_KEPT = frozenset(
    {
        *(Kind.F, Kind.OVERLAP_F_B, Kind.ENCODE, Kind.EXCHANGE, Kind.HEAD),
        *(Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD),
    }
)


def without_backwards(schedule: Schedule, *, encodes_only: bool = False) -> Schedule:
    """Return a schedule without backwards, their messages and reductions.

    ``encodes_only``: also without heads and the foundation's stages after the first, which then only reads features.
    """
    rows = [[*_forwards_in(row)] for row in schedule.actions]
    if encodes_only:
        rows = [[*filter(_is_of_encoders, row)] for row in rows]
    return schedule.with_actions(rows)


def _forwards_in(row: Iterable[Action]) -> Iterator[Action]:
    for action in row:
        if action.kind in _KEPT:
            yield action.parts[0] if action.parts else action


def _is_of_encoders(action: Action) -> bool:
    """Whether an action encodes, or belongs to the first stage, whose forward calls components; and is no message."""
    if action.component != FOUNDATION or action.stage is None:
        return action.kind is not Kind.HEAD and action.component == action.owner
    return action.stage == 0 and action.kind not in (Kind.SEND_F, Kind.RECV_F)
