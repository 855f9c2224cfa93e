"""Schedules against closed forms, exactly, and against the tables of torch.distributed.pipelining."""

import itertools

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import Kind, Schedule
from omnitrain.plan.schedule.generators import (
    accumulate,
    generate,
    gpipe,
    interleaved,
    least_micro_batches,
    one_f_one_b,
    stage_of,
    stage_ranks,
    zbv,
)
from omnitrain.plan.schedule.lower import lower
from omnitrain.plan.schedule.simulate import simulate
from omnitrain.plan.schedule.validate import problems_in
from tests.plan.schedule.as_text import idle_inside, read, text_of

F, B = 7 * 840, 11 * 840  # a rank's time over all its chunks; integers that 1 to 8 chunks divide, so times are exact


def pipelined(p: int, v: int, m: int) -> Schedule:
    return one_f_one_b(p, m) if v == 1 else interleaved(p, v, m)


def chunk_times(v: int) -> dict[Kind, int]:
    return {Kind.F: F // v, Kind.B: B // v}


def check_idle(schedule: Schedule, p: int, v: int) -> None:
    timeline = simulate(schedule, chunk_times(v))
    closed_form = (p - 1) * (F + B) // v
    assert [timeline.idle(rank) for rank in range(p)] == [closed_form] * p, (p, v, schedule.num_micro_batches)


@pytest.mark.parametrize(
    ("p", "v", "m"),
    [
        (2, 1, 2),
        (2, 2, 6),
        (3, 4, 9),
        (4, 2, 8),
        (5, 3, 10),
        (8, 2, 16),
        (7, 5, 7),
        (16, 2, 16),
        (2, 8, 16),
        (8, 1, 21),
    ],
)
def test_idle_time_of_interleaved_1f1b_is_the_closed_form(p: int, v: int, m: int) -> None:
    check_idle(lower(pipelined(p, v, m)), p, v)


@pytest.mark.slow
@pytest.mark.parametrize("p", range(2, 17))
def test_idle_time_of_interleaved_1f1b_is_the_closed_form_for_all_sizes(p: int) -> None:
    for v in range(1, 9):
        for m in range(p, 8 * p + 1, p if v > 1 else 1):
            check_idle(pipelined(p, v, m), p, v)


@pytest.mark.parametrize(("p", "v"), [(2, 2), (3, 2), (4, 2)])
def test_any_number_of_micro_batches_runs_and_no_faster_than_the_bound(p: int, v: int) -> None:
    for m in range(1, 3 * p + 1):
        schedule = lower(interleaved(p, v, m))
        assert problems_in(schedule) == ()
        idle = simulate(schedule, chunk_times(v)).idle(0)
        assert idle >= (p - 1) * (F + B) // v
        if m >= p:
            assert idle == (p - 1) * (F + B) // v


@pytest.mark.parametrize(("p", "v", "m", "group"), [(2, 2, 8, 4), (4, 2, 12, 6), (3, 3, 7, 4)])
def test_larger_groups_keep_the_idle_time_and_more_activations(p: int, v: int, m: int, group: int) -> None:
    schedule = interleaved(p, v, m, group_size=group)
    assert problems_in(lower(schedule)) == ()
    assert simulate(schedule, chunk_times(v)).idle(0) == (p - 1) * (F + B) // v
    assert schedule.peak_live()[0] > interleaved(p, v, m).peak_live()[0]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 4, 16), (8, 2, 16)])
def test_makespan_of_overlapped_forwards_and_backwards_is_the_closed_form(p: int, v: int, m: int) -> None:
    both = 13 * 840  # a rank's forward and backward side by side
    schedule = lower(interleaved(p, v, m, overlap=True))
    timeline = simulate(schedule, {**chunk_times(v), Kind.OVERLAP_F_B: both // v})
    alone = p * v - (p - 1)  # chunks whose forward and backward overlap with nothing
    assert timeline.makespan == m * both + alone * (F + B - both) // v + (p - 1) * (F + B) // v
    assert schedule.peak_live()[0] == v * p + p


@pytest.mark.parametrize(("p", "v"), [*itertools.product((2, 4, 8, 16), (1, 2, 3, 4, 8))])
def test_pairs_have_the_bubble_of_interleaved_1f1b_and_keep_one_chunk_more(p: int, v: int) -> None:
    m = 4 * p
    paired = one_f_one_b(p, m, overlap=True) if v == 1 else interleaved(p, v, m, overlap=True)
    check_idle(paired, p, v)
    assert paired.peak_live()[0] == p * v + p == interleaved(p, v, m).peak_live()[0] + 1


def test_gpipe_and_accumulation_take_their_closed_forms() -> None:
    for p, m in itertools.product((1, 2, 5), (1, 4, 7)):
        assert simulate(lower(gpipe(p, m)), {Kind.F: F, Kind.B: B}).makespan == (m + p - 1) * (F + B)
    assert text_of(accumulate(2)) == "0F0,0B0,0F1,0B1\n"
    assert text_of(accumulate(3, overlap=True)) == "0F0,(0F1;0B0)OVERLAP_F_B,(0F2;0B1)OVERLAP_F_B,0B2\n"


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_zbv_has_no_idle_time_inside_if_f_i_and_w_are_equal(p: int) -> None:
    for m in (2 * p - 1, 2 * p + 1):
        schedule = lower(zbv(p, m))
        assert problems_in(schedule) == () and max(schedule.peak_live()) <= 2 * p
        timeline = simulate(schedule, {Kind.F: 1, Kind.I: 1, Kind.W: 1})
        assert [idle_inside(timeline, rank) for rank in range(p)] == [0] * p
        assert timeline.makespan == 6 * m + p - 1  # all ranks waiting for the last one to end


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 2, 1), (2, 2, 1), (3, 4, 2)])
def test_zbv_is_faster_than_1f1b_at_the_same_memory(f: int, i: int, w: int) -> None:
    for p in (2, 4):
        m = 2 * p
        split = simulate(lower(zbv(p, m)), {Kind.F: f, Kind.I: i, Kind.W: w})
        whole = simulate(lower(one_f_one_b(p, m)), {Kind.F: 2 * f, Kind.B: 2 * (i + w)})
        assert split.makespan < whole.makespan
        assert max(split.schedule.peak_live()) == 2 * max(whole.schedule.peak_live())  # of stages half as deep


def test_a_v_puts_adjacent_stages_on_one_rank_where_it_turns() -> None:
    assert stage_ranks(4, 2) == (0, 1, 2, 3, 0, 1, 2, 3)
    assert stage_ranks(4, 2, is_v=True) == (0, 1, 2, 3, 3, 2, 1, 0)
    for is_v, p, v in itertools.product((False, True), (1, 3, 4), (1, 2, 3)):
        ranks = stage_ranks(p, v, is_v=is_v)
        assert [ranks[stage_of(r, c, p, is_v=is_v)] for r in range(p) for c in range(v)] == [
            r for r in range(p) for _ in range(v)
        ]


def torch_table(name: str, p: int, v: int, m: int) -> Schedule:
    """A table of torch; its cells are read by our parser."""
    rows = get_schedule_ops(name, p, m, *([v] if v > 1 else []))
    cells = [[str(action) for action in row if action is not None] for row in rows]
    return read("\n".join(",".join(cell for cell in row if "REDUCE" not in cell) for row in cells))


TORCH = [
    ("GPipe", 4, 1, 6, gpipe(4, 6)),
    ("Interleaved1F1B", 4, 2, 8, interleaved(4, 2, 8)),
    ("Interleaved1F1B", 4, 2, 10, interleaved(4, 2, 10)),
    ("Interleaved1F1B", 4, 3, 6, interleaved(4, 3, 6)),
    ("Interleaved1F1B", 3, 2, 2, interleaved(3, 2, 2)),
    ("ZBVZeroBubble", 4, 2, 8, zbv(4, 8)),
    ("ZBVZeroBubble", 4, 2, 5, zbv(4, 5)),
    ("ZBVZeroBubble", 2, 2, 3, zbv(2, 3)),
]


@pytest.mark.parametrize(("name", "p", "v", "m", "ours"), TORCH)
def test_torch_has_the_same_actions_and_no_shorter_makespan(name: str, p: int, v: int, m: int, ours: Schedule) -> None:
    theirs = torch_table(name, p, v, m)
    assert theirs.stage_ranks == ours.stage_ranks
    assert list(map(sorted, theirs.actions)) == list(map(sorted, ours.actions))
    for times in ({Kind.F: 1, Kind.I: 1, Kind.W: 1}, {Kind.F: 2, Kind.I: 3, Kind.W: 1}):
        assert simulate(ours, times).makespan <= simulate(theirs, times).makespan


def test_torch_has_our_1f1b_on_all_ranks_but_the_last() -> None:
    rows = get_schedule_ops("1F1B", 4, 8)  # of its last rank torch leaves out forward 0 and adds a forward 8
    theirs = [[str(a) for a in row if a is not None and "REDUCE" not in str(a)] for row in rows]
    ours = [[str(action) for action in row] for row in one_f_one_b(4, 8).actions]
    assert theirs[:3] == ours[:3]
    assert "3F0" not in theirs[3]


@pytest.mark.slow
def test_other_numbers_of_micro_batches_are_never_slower_than_torch() -> None:
    sizes = [(p, v, m) for p in range(2, 9) for v in (2, 3, 4) for m in range(1, 4 * p)]
    for p, v, m in sizes:
        ours = interleaved(p, v, m)
        assert problems_in(lower(ours)) == ()
        idle = simulate(ours, chunk_times(v)).idle(0)
        assert idle >= (p - 1) * (F + B) // v
        try:
            theirs = torch_table("Interleaved1F1B", p, v, m)
        except ValueError:  # torch does not have this number
            continue
        assert idle <= simulate(theirs, chunk_times(v)).idle(0)


@pytest.mark.parametrize(
    ("kind", "chunks", "group", "message"),
    [
        ("2f2b", None, None, "there is no pipeline schedule '2f2b'; there are gpipe, 1f1b, interleaved, zbv"),
        ("1f1b", 2, None, "1f1b has 1 stage on each rank, not 2; for more use interleaved"),
        ("interleaved", 1, None, "interleaved needs at least 2 stages on each rank, not 1; for 1 use 1f1b"),
        ("zbv", 3, None, "zbv has 2 stages on each rank, not 3"),
        ("gpipe", None, 4, "gpipe has no groups of micro-batches"),
        ("interleaved", 2, 3, "a group of 3 micro-batches does not fill a pipeline of 4 ranks"),
    ],
)
def test_settings_that_a_schedule_does_not_have_are_refused(
    kind: str, chunks: int | None, group: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        generate(kind, 4, 8, num_chunks=chunks, group_size=group)


def test_a_schedule_by_name_has_its_idle_time_from_its_least_number_of_micro_batches() -> None:
    for kind, least in (("gpipe", 1), ("1f1b", 4), ("interleaved", 4), ("zbv", 7)):
        assert least_micro_batches(kind, 4) == least
        assert generate(kind, 4, least).num_stages == (8 if kind in ("interleaved", "zbv") else 4)
    with pytest.raises(ScheduleError, match="at least 1 of its micro-batches, not 0"):
        generate("1f1b", 4, 0)
