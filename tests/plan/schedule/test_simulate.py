import json

import pytest

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import Action, Kind
from omnitrain.plan.schedule.draw import as_json, gantt, grid
from omnitrain.plan.schedule.generators import interleaved, one_f_one_b, zbv
from omnitrain.plan.schedule.lower import lower
from omnitrain.plan.schedule.simulate import DeadlockError, MessageCost, simulate
from tests.plan.schedule.as_text import read

TIMES = {Kind.F: 2, Kind.B: 4}


def test_messages_cost_their_latency_and_their_bytes_once_on_each_hop() -> None:
    schedule = lower(one_f_one_b(3, 1))
    link = MessageCost(latency=1, bandwidth=10, message_bytes=lambda action: 20 if action.kind is Kind.SEND_F else 30)
    timeline = simulate(schedule, TIMES, link)
    assert timeline.makespan == 3 * (2 + 4) + 2 * (2 + 1) + 2 * (3 + 1)
    assert [timeline.exposed(rank) for rank in range(3)] == [4, 3 + 4 + 4, 3 + 4]  # a last send is exposed at the end


def test_messages_of_a_rank_share_its_communication_stream() -> None:
    schedule = read("0F0,0SEND_F0>1,0F1,0SEND_F1>1\n1RECV_F0<0,1RECV_F1<0,1F0,1F1\n")
    timeline = simulate(schedule, {Kind.F: 1}, MessageCost(bandwidth=1, message_bytes=lambda _: 5))
    sends = [(event.start, event.end) for event in timeline.events[0] if event.action.kind is Kind.SEND_F]
    assert sends == [(1, 6), (6, 11)]
    assert timeline.makespan == 12
    assert timeline.idle(0) == 10


def test_gathers_and_reductions_run_beside_computation_and_what_is_left_is_exposed() -> None:
    schedule = lower(interleaved(1, 2, 1))  # 0UNSHARD,1UNSHARD,0F0,1F0,1B0,1REDUCE,1RESHARD,0B0,0REDUCE,0RESHARD
    timeline = simulate(schedule, {**TIMES, Kind.UNSHARD: 3, Kind.REDUCE: 3})
    assert timeline.makespan == 3 + 2 + 1 + 2 + 4 + 4 + 3
    assert timeline.exposed(0) == 3 + 1 + 3
    assert timeline.idle(0) == 7


def test_a_send_that_waits_for_its_receive_holds_its_rank() -> None:
    schedule = read("0F0,0SEND_F0>1,0F1,0SEND_F1>1\n1RECV_F0<0,1F0,1RECV_F1<0,1F1\n")
    assert simulate(schedule, {Kind.F: 3}).makespan == 9
    assert [event.start for event in simulate(schedule, {Kind.F: 3}, slots=0).events[0]] == [0, 3, 3, 6]
    late = read("0F0,0SEND_F0>1,0F1,0SEND_F1>1\n1F9,1RECV_F0<0,1F0,1RECV_F1<0,1F1\n")
    with pytest.raises(DeadlockError, match="rank 1 waits at action 0, 1F9, for 1RECV_F9, which no rank does"):
        simulate(late, {Kind.F: 3}, slots=0)


def test_a_buffer_of_one_message_lets_a_sender_run_one_ahead() -> None:
    schedule = read("0F0,0SEND_F0>1,0F1,0SEND_F1>1,0B1,0B0\n1F9,1RECV_F0<0,1F0,1RECV_F1<0,1F1\n")
    with pytest.raises(DeadlockError) as stopped:
        simulate(schedule, TIMES, slots=1)
    assert [wait.rank for wait in stopped.value.waits] == [1]
    two = "0F0,0SEND_F0>1,0F1,0SEND_F1>1,0RECV_B0<1,0B0,0RECV_B1<1,0B1\n"
    two += "1RECV_F0<0,1F0,1B0,1SEND_B0>0,1RECV_F1<0,1F1,1B1,1SEND_B1>0\n"
    with pytest.raises(DeadlockError, match="0SEND_F1>1, for 1RECV_F1<0"):
        simulate(read(two), TIMES, slots=0)
    assert simulate(read(two), TIMES, slots=1).makespan == simulate(one_f_one_b(2, 2), TIMES).makespan


def test_durations_are_a_function_or_a_mapping_by_kind_and_stage() -> None:
    schedule = lower(one_f_one_b(2, 3))
    mapping = {Kind.F: 1, (Kind.F, 1): 5, Kind.I: 2, Kind.W: 3}
    times = {"F": {0: 1, 1: 5}, "B": {0: 5, 1: 5}}
    by_function = simulate(schedule, lambda action: times.get(action.kind, {}).get(action.stage, 0))
    assert simulate(schedule, mapping).events == by_function.events
    overlapped = simulate(lower(one_f_one_b(1, 3, overlap=True)), TIMES)
    assert overlapped.makespan == 3 * 6
    with pytest.raises(ScheduleError, match="no duration for 0F0"):
        simulate(schedule, {Kind.B: 1})


def test_collectives_of_all_ranks_start_together() -> None:
    schedule = lower(one_f_one_b(2, 1))
    update = Action(Kind.OPTIMIZER)
    timeline = simulate(schedule.with_actions((*row, update) for row in schedule.actions), {**TIMES, Kind.OPTIMIZER: 1})
    assert [row[-1].start for row in timeline.events] == [12, 12]
    assert timeline.makespan == 13


def test_the_grid_shows_a_step_in_each_column() -> None:
    assert grid(lower(one_f_one_b(2, 3))) == (
        "rank  0 | 0F0 0F1     0B0 0F2 0B1     0B2\nrank  1 |     1F0 1B0 1F1 1B1 1F2 1B2\n"
    )
    assert "0F1|0B0" in grid(one_f_one_b(1, 2, overlap=True))
    assert grid(one_f_one_b(2, 3), width=30) == (
        "rank  0 | 0F0 0F1     0B0 0F2\nrank  1 |     1F0 1B0 1F1 1B1\n\nrank  0 | 0B1     0B2\nrank  1 | 1F2 1B2\n"
    )


def test_the_gantt_chart_shows_time_and_idle_shares() -> None:
    timeline = simulate(lower(one_f_one_b(2, 2)), TIMES)
    assert gantt(timeline, width=36) == (
        "rank  0 |0F0>0F1>........0B0<<<<<....0B1<<<<<| idle 33.3%\n"
        "rank  1 |....1F0>1B0<<<<<1F1>1B1<<<<<........| idle 33.3%\n"
    )
    with_messages = gantt(simulate(lower(one_f_one_b(2, 2)), TIMES, MessageCost(latency=1)), width=60)
    assert with_messages.count("exposed") == 2
    assert "~~" in with_messages


def test_json_has_all_numbers_of_the_timeline() -> None:
    timeline = simulate(lower(zbv(2, 4)), {Kind.F: 1, Kind.I: 1, Kind.W: 1})
    data = json.loads(json.dumps(as_json(timeline)))
    assert data["makespan"] == 6 * 4 + 1
    assert data["bubble"] == pytest.approx(1 / 25)
    assert [rank["peak_live"] for rank in data["ranks"]] == [4, 4]
    assert data["ranks"][0]["events"][0] == {"action": "0F0", "stream": "compute", "start": 0.0, "end": 1.0}
    assert sum(event["end"] - event["start"] for event in data["ranks"][1]["events"]) == 6 * 4
