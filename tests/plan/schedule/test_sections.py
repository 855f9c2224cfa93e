"""Encoders with ranks of their own run beside every schedule, within slots and ``in_flight``, and never stop."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from omnitrain.errors import ScheduleError
from omnitrain.plan.schedule.actions import Action, Kind, Schedule, SectionWindows
from omnitrain.plan.schedule.generators import accumulate, gpipe, interleaved, one_f_one_b, zbv
from omnitrain.plan.schedule.lower import lower
from omnitrain.plan.schedule.sections import with_sections
from omnitrain.plan.schedule.simulate import simulate
from omnitrain.plan.schedule.validate import problems_in
from tests.plan.schedule.as_text import idle_inside, text_of

TIMES = {Kind.F: 1, Kind.I: 1, Kind.W: 1}


def vision(m: int, **fields: object) -> SectionWindows:
    """A trained encoder with items in all micro-batches."""
    given = {"size": 1, "slots": 2, "trained": frozenset({"image"}), "encoded": {"image": range(m)}}
    return SectionWindows("vision", **(given | fields))


def timed(seconds: float) -> dict[Kind, float]:
    return {**TIMES, Kind.ENCODE: seconds, Kind.HEAD: 3 * seconds, Kind.ENCODE_B: 2 * seconds}


def planned(schedule: Schedule, *sections: SectionWindows, seconds: float = 0.5) -> Schedule:
    return with_sections(schedule, sections, TIMES, lambda component, window: seconds)


def encodes(schedule: Schedule, row: int = -1) -> list[tuple[str, int]]:
    """The forwards (F) and backwards (B) of a section, with the window."""
    kinds = {Kind.ENCODE: "F", Kind.ENCODE_B: "B"}
    return [(kinds[a.kind], a.micro_batch or 0) for a in schedule.actions[row] if a.kind in kinds]


def test_without_sections_or_micro_batches_a_schedule_stays_as_it_is() -> None:
    schedule = accumulate(3)
    assert planned(schedule) is schedule
    assert planned(nothing := Schedule(((),), (0,), 0), vision(0)) is nothing


@pytest.mark.parametrize("m", [1, 2, 5, 16])
@pytest.mark.parametrize("seconds", [0.25, 0.5, 1.0])
def test_a_section_that_keeps_up_costs_only_its_first_forward_and_its_last_backward(m: int, seconds: float) -> None:
    """A micro-batch takes 3 in ``main`` and at most 3 in the section."""
    timeline = simulate(planned(accumulate(m), vision(m), seconds=seconds), timed(seconds))
    assert timeline.makespan == pytest.approx(seconds + 3 * m + 2 * seconds)
    frozen = planned(accumulate(m), vision(m, trained=frozenset()), seconds=seconds)
    assert simulate(frozen, timed(seconds)).makespan == pytest.approx(seconds + 3 * m)


@pytest.mark.parametrize("seconds", [2.0, 5.0])
def test_a_section_that_is_too_slow_sets_the_pace(seconds: float) -> None:
    """All its forwards and backwards, and at the end the one micro-batch of ``main`` that they wait for."""
    timeline = simulate(planned(accumulate(8), vision(8), seconds=seconds), timed(seconds))
    assert idle_inside(timeline, 1) <= 3
    assert timeline.makespan <= 8 * 3 * seconds + 3


def test_a_section_encodes_ahead_as_far_as_there_is_room() -> None:
    free = encodes(planned(accumulate(5), vision(5, slots=5)))
    assert [kind for kind, _ in free] == ["F"] * 5 + ["B"] * 5
    one = encodes(planned(accumulate(5), vision(5, slots=5, in_flight=1)))
    assert one == [(kind, window) for window in range(5) for kind in "FB"]
    twice = vision(5, slots=5, in_flight=1, encode_twice=True)
    assert encodes(planned(accumulate(5), twice)) == free


def test_components_of_a_section_encode_in_order_and_windows_without_items_are_left_out() -> None:
    section = vision(6, size=2, encoded={"image": [0, 4], "audio": [2, 4]}, trained=frozenset({"audio"}), slots=9)
    schedule = planned(accumulate(6), section)
    listed = [str(a) for a in schedule.actions[1] if a.kind in (Kind.ENCODE, Kind.ENCODE_B)]
    assert listed == [
        "ENCODE0@image",
        "ENCODE2@audio",
        "ENCODE4@image",
        "ENCODE4@audio",
        "ENCODE_B2@audio",
        "ENCODE_B4@audio",
    ]
    assert [str(a) for a in schedule.actions[0] if a.stage is None] == [
        "RECV_F0<1@image",
        "RECV_F2<1@audio",
        "SEND_B2>1@audio",
        "RECV_F4<1@image",
        "RECV_F4<1@audio",
        "SEND_B4>1@audio",
    ]


def chain(m: int, **fields: object) -> list[SectionWindows]:
    """A section with a tower, and one with its projector."""
    windows = {"tower": range(m)}, {"projector": range(m)}
    tower, projector = (vision(m, encoded=e, trained=frozenset(e), **fields) for e in windows)
    return [replace(tower, name="towers"), replace(projector, name="projectors", reads={"projector": "tower"})]


def test_a_section_reads_the_features_of_another_one_and_returns_their_gradients() -> None:
    schedule = planned(accumulate(1), *chain(1))
    towers, projectors = (
        [str(a) for a in row if a.kind not in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE)] for row in schedule.actions[1:]
    )
    assert towers == ["ENCODE0@tower", "SEND_F0>2@tower", "RECV_B0<2@tower", "ENCODE_B0@tower"]
    assert projectors == [
        "RECV_F0<1@tower",
        "ENCODE0@projector",
        "SEND_F0>0@projector",
        "RECV_B0<0@projector",
        "ENCODE_B0@projector",
        "SEND_B0>1@tower",
    ]
    without = schedule.with_actions(
        [*schedule.actions[:2], [a for a in schedule.actions[2] if "SEND_B0" not in str(a)]]
    )
    assert any("SEND_B0>1@tower" in problem.message for problem in problems_in(without))


def test_a_component_of_a_section_may_have_stages() -> None:
    """Each stage takes 0.5; the features leave the last one, to which their gradients come back."""
    schedule = planned(accumulate(2), vision(2, num_stages=2))
    first, last = (
        [str(a) for a in row if a.kind not in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE)] for row in schedule.actions[1:]
    )
    assert first[:4] == ["0F0@image", "0SEND_F0>2@image", "0F1@image", "0SEND_F1>2@image"]
    assert first[4:] == ["0RECV_B0<2@image", "0B0@image", "0RECV_B1<2@image", "0B1@image"]
    assert last[:4] == ["1RECV_F0<1@image", "1F0@image", "SEND_F0>0@image", "1RECV_F1<1@image"]
    assert last[6:9] == ["RECV_B0<0@image", "1B0@image", "1SEND_B0>1@image"]
    assert [str(a) for a in schedule.actions[0][:4]] == ["RECV_F0<2@image", "0F0", "0B0", "SEND_B0>2@image"]

    def seconds(action: Action) -> float:
        return {Kind.F: 1, Kind.B: 2}.get(action.kind, 0) * (0.5 if action.component == "image" else 1)

    assert simulate(schedule, seconds, slots=0).makespan == 2 * 0.5 + 2 * 3 + 2 * 1


@pytest.mark.parametrize("m", [1, 5, 8])
@pytest.mark.parametrize("make", [one_f_one_b, zbv])
def test_stages_of_sections_that_read_each_other_run_beside_stages(make: Callable[..., Schedule], m: int) -> None:
    sections = [replace(section, num_stages=n) for section, n in zip(chain(m), (2, 3), strict=True)]
    schedule = planned(lower(make(2, m)), *sections)
    assert problems_in(schedule) == () and schedule.num_ranks == schedule.num_pipeline_ranks + 5
    without = [[a for a in row if str(a) != "1SEND_B0>2@tower"] for row in schedule.actions]
    (problem, *_) = problems_in(schedule.with_actions(without))
    assert "1SEND_B0>2@tower is missing" in problem.message


def test_a_decoder_of_a_section_computes_the_loss_between_a_forward_and_a_backward_of_the_last_stage() -> None:
    section = vision(2, heads={"image": [0]})
    schedule = planned(lower(one_f_one_b(2, 2), hold_weights=False), section)
    assert problems_in(schedule) == ()
    _, last, own = ([str(a) for a in row if a.computes or "@" in str(a)] for row in schedule.actions)
    own = [action for action in own if "SHARD" not in action]
    assert last[:4] == ["1F0", "SEND_F0>2@image.states", "RECV_F0<2@image.loss", "1B0"]
    of_window = own[own.index("RECV_F0<1@image.states") :]
    assert own[:2] == ["ENCODE0@image", "SEND_F0>0@image"]
    assert of_window[:3] == ["RECV_F0<1@image.states", "HEAD0@image", "SEND_F0>1@image.loss"]
    rows = [[*row] for row in schedule.actions]
    at = rows[1].index(Action.parse("RECV_F0<2@image.loss"))
    rows[1][at : at + 2] = rows[1][at : at + 2][::-1]
    (problem, *_) = problems_in(schedule.with_actions(rows))
    assert "expected 1F0, SEND_F0>2@image.states, RECV_F0<2@image.loss, 1B0" in problem.message


def test_a_backward_waits_for_its_loss_alone() -> None:
    """Of ``main``, the first and the last micro-batch are text; a micro-batch takes 3, and the head 1.5."""
    section = vision(4, encoded={"image": [1, 2]}, heads={"image": [1, 2]})
    timeline = simulate(planned(accumulate(4), section, seconds=0.5), timed(0.5))
    assert timeline.makespan == 4 * 3 + 2 * 1.5


@pytest.mark.parametrize("seconds", [0.1, 0.25])
def test_a_further_forward_hides_the_losses_of_a_section(seconds: float) -> None:
    """All but the first forward of the section, and its last backward, run beside ``main``."""
    section = vision(8, heads={"image": range(8)})
    exposed = simulate(planned(accumulate(8), section, seconds=seconds), timed(seconds))
    assert exposed.makespan == pytest.approx(3 * seconds + 8 * (3 + 3 * seconds))
    hidden = simulate(planned(one_f_one_b(1, 8, extra_warm_up=1), section, seconds=seconds), timed(seconds))
    assert hidden.makespan == pytest.approx(3 * seconds + 8 * 3)


@pytest.mark.parametrize("m", [1, 5, 16])
def test_two_sections_that_keep_up_cost_only_their_first_forwards_and_last_backwards(m: int) -> None:
    timeline = simulate(planned(accumulate(m), *chain(m), seconds=0.5), timed(0.5))
    assert timeline.makespan == pytest.approx(2 * 0.5 + 3 * m + 2 * 1.0)


def test_a_section_is_not_further_ahead_than_the_one_that_it_reads_may_be() -> None:
    towers, projectors = chain(6, slots=6)
    schedule = planned(accumulate(6), replace(towers, in_flight=2), projectors)
    assert encodes(schedule, 1)[:4] == encodes(schedule, 2)[:4] == [("F", 0), ("F", 1), ("B", 0), ("F", 2)]
    assert problems_in(schedule) == ()


def test_sections_that_read_each_other_are_refused() -> None:
    towers, projectors = chain(2)
    with pytest.raises(ScheduleError, match="towers and projectors read features of each other, and would wait"):
        planned(accumulate(2), replace(towers, reads={"tower": "projector"}), projectors)


def test_a_section_that_would_starve_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"sections.vision.in_flight: found 3, .* allow more, or set encode_twice"):
        planned(lower(one_f_one_b(4, 8)), vision(8, in_flight=3))
    assert problems_in(planned(lower(one_f_one_b(4, 8)), vision(8, in_flight=4))) == ()


def random_main(rng: random.Random) -> Schedule:
    p, v, m = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 8)
    compute = rng.choice(
        [
            accumulate(m),
            gpipe(p, m),
            one_f_one_b(p, m, extra_warm_up=rng.randint(0, 2)),
            interleaved(p, v, m, group_size=rng.choice([None, p + 1])),
            zbv(p, m),
            interleaved(p, v, m, overlap=True),
        ]
    )
    if compute.num_ranks == 1 and rng.random() < 0.5:
        return compute
    return lower(compute, receives_ahead=rng.randint(0, 3), max_gathered=rng.choice([None, 1, 2]))


def random_section(rng: random.Random, name: str, m: int) -> SectionWindows:
    size = rng.choice([1, rng.randint(1, m)])
    components = [f"{name}{number}" for number in range(rng.randint(1, 2))]
    starts = range(0, m, size)
    encoded = {c: sorted(rng.sample(starts, rng.randint(0, len(starts)))) for c in components}
    return SectionWindows(
        name=name,
        encoded=encoded,
        heads={c: encoded[c] for c in components if size == 1 and rng.random() < 0.5},
        trained=frozenset(c for c in components if rng.random() < 0.7),
        size=size,
        slots=rng.randint(1, 4),
        in_flight=rng.choice([None, *range(1, m + 1)]),
        encode_twice=rng.random() < 0.3,
    )


def random_reader(rng: random.Random, sections: list[SectionWindows], m: int) -> SectionWindows:
    """A section that reads a component of each of these sections, if their windows are equal, or of the first one."""
    reader = random_section(rng, "reader", m)
    of_size = [section for section in sections if section.size == sections[0].size]
    reads = {f"reader of {component}": component for s in of_size for component in rng.sample(sorted(s.encoded), 1)}
    windows = {component: windows for section in of_size for component, windows in section.encoded.items()}
    trained = [name for name, read in reads.items() if rng.random() < 0.5 or any(read in s.trained for s in of_size)]
    own = {} if reader.size != sections[0].size else reader.encoded
    return replace(
        reader,
        size=sections[0].size,
        encoded=own | {name: windows[read] for name, read in reads.items()},
        trained=(reader.trained & own.keys()) | {*trained},
        reads=reads,
        heads=reader.heads if own else {},
    )


def random_schedule(rng: random.Random) -> Schedule | None:
    """None: a section would starve."""
    main = random_main(rng)
    sections = [random_section(rng, name, main.num_micro_batches) for name in ("vision", "audio")[: rng.randint(1, 2)]]
    if rng.random() < 0.5:
        sections.append(random_reader(rng, sections, main.num_micro_batches))
        rng.shuffle(sections)
    try:
        return with_sections(main, sections, TIMES, lambda component, window: len(component) * 0.1 + window % 3)
    except ScheduleError as error:
        assert any(s.in_flight is not None and not s.encode_twice for s in sections) or "another order" in str(error)
        return None


@pytest.mark.parametrize("seed", range(10))
def test_random_sections_beside_random_schedules_never_stop(seed: int) -> None:
    rng, found = random.Random(seed), 0
    while found < 20:
        if (schedule := random_schedule(rng)) is None:
            continue
        found += 1
        assert problems_in(schedule) == (), text_of(schedule)
        for slots in (0, 1, None):
            assert simulate(schedule, timed(rng.random()), slots=slots).makespan > 0


@pytest.mark.parametrize("seed", range(10))
def test_a_section_keeps_no_more_windows_than_it_may(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        main = random_main(rng)
        section = replace(random_section(rng, "vision", main.num_micro_batches), encode_twice=False)
        windows = sorted({w for starts in section.encoded.values() for w in starts})
        has_backward = {w for c in section.trained for w in section.encoded[c]}
        try:
            schedule = planned(main, section)
        except ScheduleError:
            assert section.in_flight is not None and section.in_flight < len(has_backward)
            continue
        alive: set[int] = set()
        for kind, window in encodes(schedule):
            (alive.add if kind == "F" and window in has_backward else alive.discard)(window)
            assert section.in_flight is None or len(alive) <= section.in_flight
        forwards = dict.fromkeys(window for kind, window in encodes(schedule) if kind == "F")
        backwards = dict.fromkeys(window for kind, window in encodes(schedule) if kind == "B")
        assert sorted(forwards) == windows and [*backwards] == [w for w in forwards if w in has_backward]


def of_section(schedule: Schedule, action: Action, row: int) -> bool:
    return row >= schedule.num_pipeline_ranks or (action.stage is None and action.component not in ("", "foundation"))


@pytest.mark.parametrize("mutation", ["dropped", "doubled"])
@pytest.mark.parametrize("seed", range(6))
def test_an_action_of_a_section_that_is_missing_or_there_twice_is_named(seed: int, mutation: str) -> None:
    rng, found = random.Random(f"{seed} {mutation}"), 0
    while found < 12:
        schedule = random_schedule(rng)
        places = (
            []
            if schedule is None
            else [
                (row, index)
                for row, actions in enumerate(schedule.actions)
                for index, action in enumerate(actions)
                if of_section(schedule, action, row)
            ]
        )
        if schedule is None or not places:
            continue
        found += 1
        row, index = rng.choice(places)
        rows = [list(actions) for actions in schedule.actions]
        action = rows[row].pop(index)
        if mutation == "doubled":
            rows[row].insert(index, action)
            rows[row].insert(rng.randint(0, len(rows[row])), action)
        problems = problems_in(schedule.with_actions(rows))
        assert problems, (str(action), text_of(schedule))
        assert all(f"rank {problem.rank}" in problem.message for problem in problems)


@pytest.mark.parametrize("seed", range(6))
def test_a_message_that_comes_too_late_is_named(seed: int) -> None:
    """Features behind the forward that reads them, gradients before the backward that makes them."""
    rng, found = random.Random(seed), 0
    while found < 10:
        schedule = random_schedule(rng)
        if schedule is None or not (
            own := [a for a in schedule.actions[schedule.stage_ranks[0]] if of_section(schedule, a, 0)]
        ):
            continue
        found += 1
        first = schedule.stage_ranks[0]
        message = rng.choice(own)
        rows = [list(actions) for actions in schedule.actions]
        rows[first].remove(message)
        rows[first].insert(len(rows[first]) if message.kind is Kind.RECV_F else 0, message)
        problems = problems_in(schedule.with_actions(rows))
        assert any(message in problem.actions for problem in problems), (str(message), problems)
