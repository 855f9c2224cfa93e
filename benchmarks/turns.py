"""The time of a forward and a backward that run in turn, each while the other's all-to-all is in transit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Leg(NamedTuple):
    """Part of a pass: it computes, then starts an all-to-all, whose result the next leg of the same pass needs.

    Attributes:
        compute: seconds.
        exchange: seconds of the all-to-all; 0 for none.
    """

    compute: float
    exchange: float = 0.0


def seconds_of_pass(legs: Sequence[Leg]) -> float:
    """Return the seconds of a pass alone, which waits for each of its all-to-alls."""
    return sum(leg.compute + leg.exchange for leg in legs)


def seconds_in_turn(forward: Sequence[Leg], backward: Sequence[Leg]) -> float:
    """Return the seconds of a pair, as :func:`omnitrain.ops.turns.run_in_turns` runs it.

    The backward has the first turn, and one pass computes at a time. All-to-alls are in transit one at a time, in the
    order of their starts.

    Args:
        forward: the legs of a forward.
        backward: the legs of the backward of another micro-batch.
    """
    left = [list(backward), list(forward)]
    arrived = [0.0, 0.0]  # when the last all-to-all of each pass is there
    now = link_is_free = 0.0
    turn = 0
    while any(left):
        if left[turn]:
            leg = left[turn].pop(0)
            now = max(now, arrived[turn]) + leg.compute
            arrived[turn] = now
            if leg.exchange:
                link_is_free = arrived[turn] = max(now, link_is_free) + leg.exchange
        turn = 1 - turn
    return max(now, *arrived)
