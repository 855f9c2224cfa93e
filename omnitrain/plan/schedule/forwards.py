"""A schedule without its backwards, for held-out losses and for the features of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from omnitrain.plan.schedule.actions import FOUNDATION, Action, Kind, Schedule

_KEPT = frozenset(
    {Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD, Kind.ENCODE, Kind.EXCHANGE, Kind.OVERLAP_F_B}
)


def without_backwards(schedule: Schedule, *, encodes_only: bool = False) -> Schedule:
    """Return a schedule without backwards, their messages and reductions.

    ``encodes_only``: also without the foundation's stages after the first, which then only reads features.
    """
    rows = (_forwards_in(row) for row in schedule.actions)
    return schedule.with_actions([a for a in row if not encodes_only or _is_of_encoders(a)] for row in rows)


def _forwards_in(row: Iterable[Action]) -> Iterator[Action]:
    for action in row:
        if action.kind in _KEPT:
            yield action.parts[0] if action.parts else action


def _is_of_encoders(action: Action) -> bool:
    """Whether an action encodes, or belongs to the first stage, whose forward calls components; and is no message."""
    if action.component != FOUNDATION or action.stage is None:
        return True
    return action.stage == 0 and action.kind not in (Kind.SEND_F, Kind.RECV_F)
