"""NCCL connects two ranks at their first message, and who comes first waits on the host: which schedules then stop?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from omnitrain.errors import ScheduleError
from omnitrain.parallel.placement import pipeline_shape
from omnitrain.parallel.resolve.sections import full_windows
from omnitrain.plan import Placement
from omnitrain.plan.schedule.actions import RECEIVES, Action, Kind, Schedule
from omnitrain.plan.schedule.encoders import with_encoders
from omnitrain.plan.schedule.generators import KINDS, generate, interleaved, one_f_one_b
from omnitrain.plan.schedule.lower import lower
from omnitrain.plan.schedule.sections import with_sections
from omnitrain.plan.schedule.table import table_of
from omnitrain.plan.schedule.validate import problems_in, validate
from omnitrain.recipe import ComponentPlan, ParallelPlan, Recipe
from omnitrain.recipe.layout import parse_layout
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.recipe.plan_groups import PipelineSchedule
from tests.parallel.schedule import paired, pipelines, separate
from tests.parallel.sections import layouts
from tests.plan.schedule.as_text import channels, text_of, unconnected
from tests.plan.schedule.test_sections import random_schedule

RECEIVE_FOR = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}


def lowered(kind: str, p: int, v: int | None, m: int, *, overlap: bool, windows: int = 0) -> Schedule | None:
    """None: the kind has no such schedule."""
    try:
        passes = generate(kind, p, m, num_chunks=v, overlap=overlap)
    except ScheduleError:
        return None
    return lower(with_encoders(passes, [Placement("vision", (), window=windows)] if windows else []))


@pytest.mark.parametrize(
    ("kind", "p", "overlap"),
    [("1f1b", 2, False), ("1f1b", 4, False), ("1f1b", 8, True), ("interleaved", 2, False), ("interleaved", 8, True)],
)
def test_a_schedule_whose_ranks_are_not_connected_stops_in_its_first_step(kind: str, p: int, overlap: bool) -> None:
    schedule = lowered(kind, p, None, 2 * p, overlap=overlap)
    assert schedule is not None
    assert problems_in(unconnected(schedule)) != ()
    assert problems_in(schedule) == ()


def test_the_report_names_the_two_first_messages_that_wait_for_each_other() -> None:
    why = r"rank 0 waits at action 1, RECV_B0<1@connects.* rank 1 waits at action 1, RECV_B0<0@connects"
    with pytest.raises(ScheduleError, match=why):
        validate(unconnected(lower(one_f_one_b(2, 4))))


def test_one_connected_direction_is_not_enough() -> None:
    schedule = lower(interleaved(2, 2, 4))
    every = set(channels(schedule))
    forward = {channel for channel in every if channel[0] == "F"}
    with pytest.raises(ScheduleError, match="the schedule stops"):
        validate(unconnected(schedule, every - forward))
    assert problems_in(unconnected(schedule, forward)) == ()


def with_late_receives(schedule: Schedule) -> Schedule:
    """Each receive directly before the forward or backward that needs it."""
    rows = []
    for row in schedule.actions:
        receives = {(a.kind, a.stage, a.micro_batch): a for a in row if a.kind in RECEIVES}
        late: list[Action] = []
        for action in row:
            if action.kind not in RECEIVES:
                wanted = [(RECEIVE_FOR[p.kind], p.stage, p.micro_batch) for p in action.passes if p.kind is not Kind.W]
                late += [receives[key] for key in wanted if key in receives] + [action]
        rows.append(late)
    return schedule.with_actions(rows)


@pytest.mark.parametrize("schedule", [interleaved(2, 2, 4), interleaved(4, 2, 8), one_f_one_b(4, 8)])
def test_connected_ranks_still_stop_where_a_receive_is_posted_after_a_send_that_waits_for_it(
    schedule: Schedule,
) -> None:
    complete = lower(schedule)
    with pytest.raises(ScheduleError, match=r"the schedule stops: rank .* waits at action .*SEND_"):
        validate(with_late_receives(complete))
    assert problems_in(complete) == ()


@pytest.mark.parametrize("sizes", [(2, 3, 5), pytest.param((4, 8, 16), marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_schedule_ends_once_all_its_ranks_are_connected(kind: str, sizes: tuple[int, ...]) -> None:
    tried = 0
    for p, v, overlap, windows in product(sizes, (None, 3, 8), (False, True), (0, 2)):
        if p * (v or 2) > 32:
            continue
        schedule = lowered(kind, p, v, p + 3, overlap=overlap, windows=windows)
        if schedule is not None:
            tried += 1
            assert problems_in(schedule) == (), (p, v, overlap, windows)
    assert tried >= 6


def test_one_hundred_random_schedules_with_sections_end_once_their_ranks_are_connected() -> None:
    rng, found, stopped = random.Random(7), 0, 0
    while found < 100:
        if (schedule := random_schedule(rng)) is not None:
            found += 1
            assert problems_in(schedule) == (), text_of(schedule)
            stopped += problems_in(unconnected(schedule)) != ()
    assert stopped > 25


RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


def schedule_of(plan: ParallelPlan, m: int) -> Schedule:
    """The schedule of a step of a plan in which each micro-batch has media for all encoders, and all are trained."""
    apart = [name for section in plan.sections.values() for name in section.components]
    plans = {name: plan.of(name) for name in (FOUNDATION, *plan.components, *apart)}
    pp = plans[FOUNDATION].pp or 1
    encoders = tuple(
        Placement(
            name,
            (),
            window=own.encode.window if isinstance(own.encode.window, int) else m if own.encode.window else 1,
            edge="exchange",
        )
        for name, own in plans.items()
        if name not in (FOUNDATION, *apart) and (own.encode.window or (pp > 1 and own.place == "world"))
    )
    main = table_of(pipeline_shape(plans[FOUNDATION]), m, encoders)
    windows = [full_windows(plan, plans, name, m, ()) for name in plan.sections]
    return with_sections(main, windows, lambda action: len(action.passes), lambda component, window: 0.5)


def plans_of_tests() -> Iterator[tuple[str, ParallelPlan, int]]:
    """The layouts of the tables of tests, with the micro-batches of a rank."""
    for words in pipelines.table():
        yield words.layout, parse_layout(words.layout).plan(), 4
    for case in paired.table():
        pp, chunks, _ = paired.STAGES[case.stages]
        schedule = PipelineSchedule(overlap=True, chunks=chunks if chunks > 1 else None)
        foundation = ComponentPlan(pp=pp, schedule=schedule)
        yield " ".join(case), ParallelPlan(components={FOUNDATION: foundation}), int(case.micro_batches)
    for row in (*separate.table(), *layouts.table()):
        yield str(row.layout), row.layout.plan(), separate.MICRO_BATCHES


def test_the_schedules_of_all_recipes_and_of_the_tables_of_tests_end_once_their_ranks_are_connected() -> None:
    plans = [*plans_of_tests()]
    plans += [(recipe.name, Recipe.load(recipe).parallel, m) for recipe in RECIPES for m in (2, 8)]
    seen = {}
    for name, plan, m in plans:
        schedule = schedule_of(plan, m)
        if schedule.num_ranks > 1:
            seen.setdefault(schedule, name)
    stopped = [name for schedule, name in seen.items() if problems_in(schedule)]
    without = [name for schedule, name in seen.items() if problems_in(unconnected(schedule))]
    assert stopped == [] and len(seen) >= 40 and len(without) >= 10
    assert {"pipeline.yaml", "overlapped_experts.yaml", "separate_encoder.yaml"} <= {name for name, *_ in plans}
