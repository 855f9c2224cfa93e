"""The position of a rank in its schedule, in words, and the rank whose message it needs there."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from omnitrain.parallel.pipeline.apply import Pipeline
from omnitrain.parallel.watch.report import StageAction
from omnitrain.plan.schedule.actions import Action, Kind, Schedule

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
}
_NEEDS = {Kind.F: (Kind.RECV_F, -1), Kind.B: (Kind.RECV_B, 1), Kind.I: (Kind.RECV_B, 1)}  # and from which stage

_TOGETHER = (Kind.EXCHANGE, Kind.ENCODE_B)  # they exchange features or gradients with the other stages


def stage_action(schedule: Schedule, pipeline: Pipeline, number: int) -> StageAction | None:
    """Return action ``number`` of this rank for the stall report; None: it waits for nothing and computes nothing.

    Args:
        schedule: a lowered schedule.
        pipeline: the pipeline that runs it.
        number: index in this rank's list.
    """
    action = schedule.actions[pipeline.stages.rank][number]
    parts = action.passes[::-1] or (action,)  # a pair begins with its backward
    if any(part.kind not in _WORDS for part in parts):
        return None
    if action.stage is None and not action.passes:
        first = "" if action.micro_batch is None else f" from micro-batch {action.micro_batch}"
        meets = tuple(_others(schedule, pipeline, action)) if action.kind in _TOGETHER else ()
        return StageAction(f"{_WORDS[action.kind]} of {action.component}{first}", number, meets=meets)
    text = " and ".join(f"{_WORDS[part.kind]} of stage {part.stage}" for part in parts)
    for part in parts:
        kind, step = _NEEDS.get(part.kind, (Kind.RECV_F, 0))
        assert part.stage is not None
        other = part.stage + step
        if step and 0 <= other < schedule.num_stages:
            receive = part._replace(kind=kind, peer=schedule.stage_ranks[other])
            if receive in schedule.senders:
                sender, sent_by = schedule.senders[receive]
                return StageAction(text, number, dist.get_global_rank(pipeline.group, sender), sent_by)
    return StageAction(text, number)


def _others(schedule: Schedule, pipeline: Pipeline, action: Action) -> Iterator[tuple[int, int]]:
    """Yield the global rank of each other stage that runs a collective action, and its index there."""
    for rank, row in enumerate(schedule.actions):
        if rank != pipeline.stages.rank:
            yield dist.get_global_rank(pipeline.group, rank), row.index(action)
