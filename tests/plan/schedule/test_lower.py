import pytest

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import Kind, Schedule
from omnitrain.plan.schedule.generators import accumulate, interleaved, one_f_one_b, zbv
from omnitrain.plan.schedule.lower import lower
from omnitrain.plan.schedule.validate import problems_in
from tests.plan.schedule.as_text import read, text_of


def texts(schedule: Schedule, rank: int, *kinds: Kind) -> list[str]:
    return [str(action) for action in schedule.actions[rank] if action.kind in kinds]


def test_a_lowered_schedule_has_all_that_a_rank_does() -> None:
    assert text_of(lower(one_f_one_b(2, 2), receives_ahead=1)) == (
        "0UNSHARD,0F0,0SEND_F0>1,0RECV_B0<1,0F1,0SEND_F1>1,0RECV_B1<1,0B0,0B1,0REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0<0,1RECV_F1<0,1UNSHARD,1F0,1B0,1SEND_B0>0,1F1,1B1,1SEND_B1>0,1REDUCE_GRAD,1RESHARD\n"
    )


def test_one_stage_without_held_weights_is_plain_accumulation() -> None:
    assert text_of(lower(accumulate(2), hold_weights=False)) == "0F0,0B0,0F1,0B1\n"


def test_between_stages_of_one_rank_nothing_is_sent() -> None:
    schedule = lower(zbv(2, 3))
    assert texts(schedule, 1, Kind.SEND_F) == ["2SEND_F0>0", "2SEND_F1>0", "2SEND_F2>0"]  # stage 1 to 2 stays here


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_receives_are_never_too_late_for_sends_that_wait(ahead: int) -> None:
    for p, m in ((2, 3), (3, 7), (4, 9)):
        for compute in (one_f_one_b(p, m), interleaved(p, 2, m), interleaved(p, 2, m, overlap=True), zbv(p, m)):
            assert problems_in(lower(compute, receives_ahead=ahead)) == ()


def test_weights_are_gathered_once_or_for_as_many_stages_as_allowed() -> None:
    once = lower(interleaved(2, 3, 4))
    assert texts(once, 0, Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE) == [
        *("0UNSHARD", "2UNSHARD", "4UNSHARD", "4REDUCE_GRAD", "4RESHARD"),
        *("2REDUCE_GRAD", "2RESHARD", "0REDUCE_GRAD", "0RESHARD"),
    ]
    for most in (1, 2):
        schedule = lower(interleaved(2, 3, 4), max_gathered=most)
        assert problems_in(schedule) == ()
        for row in schedule.actions:
            gathered = peak = 0
            for action in row:
                gathered += {Kind.UNSHARD: 1, Kind.RESHARD: -1}.get(action.kind, 0)
                peak = max(peak, gathered)
            assert peak == most
    overlapped = lower(interleaved(2, 3, 4, overlap=True), max_gathered=1)  # an overlap uses two stages
    assert problems_in(overlapped) == ()


def test_forwards_and_backwards_that_cannot_run_are_refused_before_anything_is_added() -> None:
    with pytest.raises(ScheduleError, match="rank 1: 1B0 is missing"):
        lower(read("0F0,0B0\n1F0\n"))
    with pytest.raises(ScheduleError, match="max_gathered=0 must be 1 or more"):
        lower(one_f_one_b(2, 2), max_gathered=0)
