import pytest
from torch.distributed.pipelining.schedules import _Action

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import Action, Kind
from omnitrain.plan.schedule.generators import accumulate, gpipe, interleaved, one_f_one_b, zbv
from omnitrain.plan.schedule.lower import lower
from tests.plan.schedule.as_text import read, text_of

SCHEDULES = {
    "accumulate": accumulate(3),
    "gpipe": gpipe(3, 4),
    "1f1b": one_f_one_b(4, 6),
    "interleaved": interleaved(2, 2, 5),
    "zbv": zbv(3, 5),
    "overlapped": interleaved(2, 2, 4, overlap=True),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trip_keeps_every_action(name: str) -> None:
    for schedule in (SCHEDULES[name], lower(SCHEDULES[name]), lower(SCHEDULES[name], max_gathered=1)):
        assert read(text_of(schedule)) == schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_every_cell_and_writes_forwards_and_backwards_alike(name: str) -> None:
    for action in (action for row in lower(SCHEDULES[name]).actions for action in row):
        torch_action = _Action.from_str(str(action))
        assert torch_action is not None
        assert torch_action.computation_type.value == action.kind
        assert Action.parse(str(torch_action)) == action._replace(peer=None)
        if action.peer is None:
            assert str(torch_action) == str(action)


def test_actions_outside_of_a_stage_have_a_text_too() -> None:
    for text in ("ENCODE0@vision", "EXCHANGE0@vision", "ENCODE_B0@vision", "OPTIMIZER", "1REDUCE_GRAD", "0SEND_F1>2"):
        assert str(Action.parse(text)) == text
    assert Action.parse("ENCODE0@vision") == Action(Kind.ENCODE, None, 0, component="vision")


@pytest.mark.parametrize("text", ["0X1", "F", "0F1<", "", "(0F1)OVERLAP_F_B", "0F1 0F2"])
def test_a_text_that_is_no_action_is_refused_by_name(text: str) -> None:
    if text == "F":  # a kind alone is the action of no stage
        assert Action.parse(text) == Action(Kind.F)
        return
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


def test_a_csv_without_a_stage_is_refused_by_name() -> None:
    with pytest.raises(ScheduleError, match="forward of stage 1"):
        read("0F0,0B0\n2F0,2B0\n")


def test_activations_live_from_a_forward_to_its_b_or_w() -> None:
    assert read("0F0,0F1,0I0,0I1,0W0,0F2,0W1,0B2").peak_live() == (2,)
    assert gpipe(2, 5).peak_live() == (5, 5)
    assert one_f_one_b(4, 8).peak_live() == (4, 3, 2, 1)
    assert accumulate(4).peak_live() == (1,)
