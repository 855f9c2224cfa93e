"""The position of a rank in its schedule, in words, and the ranks whose messages it needs there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.distributed as dist

from omnitrain.parallel.layout import ModelLayout
from omnitrain.parallel.watch.report import RunningAction
from omnitrain.plan.schedule.actions import LOSS, SENDS, STATES, Action, Kind, Schedule

_WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward to the input",
    Kind.W: "weight gradients",
    Kind.UNSHARD: "gather of the weights",
    Kind.REDUCE: "reduction of the gradients",
    Kind.ENCODE: "encoding",
    Kind.EXCHANGE: "exchange of the features",
    Kind.ENCODE_B: "backward",
    Kind.HEAD: "loss",
}
_BETWEEN_SECTIONS = {
    Kind.SEND_F: "send of the features",
    Kind.RECV_F: "receive of the features",
    Kind.SEND_B: "send of the gradients",
    Kind.RECV_B: "receive of the gradients",
}
_FOR_HEADS = {STATES: "hidden states for", LOSS: "losses of"}
_NEEDS = {Kind.F: (Kind.RECV_F, -1), Kind.B: (Kind.RECV_B, 1), Kind.I: (Kind.RECV_B, 1)}  # and from which stage

_TOGETHER = (Kind.EXCHANGE, Kind.ENCODE_B)  # they exchange features or gradients with the other stages

_Needs = Iterator[tuple[int, int]]  # see RunningAction


def row_of(layout: ModelLayout | None, schedule: Schedule) -> int:
    """Return the index of this rank's list of actions."""
    if layout is None:
        return 0
    if layout.section is not None:
        return schedule.num_pipeline_ranks + list(layout.sections).index(layout.state.section)
    return 0 if layout.pipeline is None else layout.pipeline.stages.rank


def running_action(schedule: Schedule, layout: ModelLayout, number: int) -> RunningAction | None:
    """Return action ``number`` of this rank for the stall report; None: it waits for nothing and computes nothing.

    Args:
        schedule: a lowered schedule.
        layout: of a model with a pipeline or sections.
        number: index in this rank's list.
    """
    row = row_of(layout, schedule)
    action = schedule.actions[row][number]
    if action.passes:
        return _pass(schedule, layout, action, number)
    number = _comparable(schedule, row, number)
    if action.stage is not None:
        words = _WORDS.get(action.kind)
        return None if words is None else RunningAction(f"{words} of stage {action.stage}", number)
    words = (_WORDS | _BETWEEN_SECTIONS).get(action.kind)
    if words is None:
        return None
    if (road := action.component.removeprefix(action.owner)) in _FOR_HEADS:
        words = f"{'send' if action.kind in SENDS else 'receive'} of the {_FOR_HEADS[road]} {action.owner}"
    else:
        words = f"{words} of {action.component}"
    text = f"{words}{_window(schedule, action.micro_batch)}"
    if row >= schedule.num_pipeline_ranks:
        text = f"section {layout.state.section}: {text}"
    elif action.kind in _BETWEEN_SECTIONS:
        text += f" {'to' if action.kind in SENDS else 'from'} section {layout.states[action.owner].section}"
    needs = _of_message if action.kind in _BETWEEN_SECTIONS else _of_stages
    return RunningAction(text, number, tuple(needs(schedule, layout, action)), action.micro_batch)


def _window(schedule: Schedule, first: int | None) -> str:
    """The window of an action in words; a section may encode those of the next step."""
    if first is None:
        return ""
    later = first - schedule.num_micro_batches
    return f" from micro-batch {first}" if later < 0 else f" from micro-batch {later} of the next step"


def _pass(schedule: Schedule, layout: ModelLayout, action: Action, number: int) -> RunningAction:
    """A forward or a backward; a pair begins with its backward."""
    parts = action.passes[::-1]
    text = " and ".join(f"{_WORDS[part.kind]} of stage {part.stage}" for part in parts)
    for part in parts:
        kind, step = _NEEDS.get(part.kind, (Kind.RECV_F, 0))
        assert part.stage is not None
        other = part.stage + step
        if step and 0 <= other < schedule.num_stages:
            receive = part._replace(kind=kind, peer=schedule.stage_ranks[other])
            if receive in schedule.senders:
                sender, sent_by = schedule.senders[receive]
                return RunningAction(text, number, ((_rank(layout, sender), sent_by),))
    return RunningAction(text, number)


def _of_stages(schedule: Schedule, layout: ModelLayout, action: Action) -> _Needs:
    """Yield what comes before an action that all stages run together, for each of the others."""
    own = row_of(layout, schedule)
    if action.kind in _TOGETHER and own < schedule.num_pipeline_ranks:
        for stage_rank in range(schedule.num_pipeline_ranks):
            if stage_rank != own:
                yield _rank(layout, stage_rank), schedule.actions[stage_rank].index(action) - 1


def _of_message(schedule: Schedule, layout: ModelLayout, action: Action) -> _Needs:
    """Yield what a message of a section needs of the ranks at its other end."""
    window, is_for_head = action.micro_batch, action.component != action.owner
    edge = (layout.losses if is_for_head else layout.edges)[action.owner]
    assert window is not None and action.peer is not None
    if action.kind is Kind.SEND_F and not is_for_head:
        taken = schedule.actions[action.peer].index
        comparable = partial(_comparable, schedule, action.peer)
        own = row_of(layout, schedule)
        for rank, before in edge.room_for(window):
            receive = None if before is None else action._replace(micro_batch=before).receive(own)
            yield rank, -1 if receive is None else comparable(taken(receive))
    elif action.kind not in SENDS:  # all else is awaited where it goes, and leaves at once
        for rank in edge.peers(window):
            yield rank, _comparable(schedule, *schedule.senders[action])


def _comparable(schedule: Schedule, row: int, index: int) -> int:
    """The index of an action in a list, as all ranks know it.

    Only the ranks of a section know what they encode ahead, so in its list messages count.
    """
    return index if row < schedule.num_pipeline_ranks else schedule.messages_before[row][index]


def _rank(layout: ModelLayout, stage_rank: int) -> int:
    """The global rank of another stage that has the same samples as this rank."""
    assert layout.pipeline is not None
    return dist.get_global_rank(layout.pipeline.group, stage_rank)
