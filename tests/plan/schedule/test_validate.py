"""The validator names what is wrong with a schedule, and finds nothing wrong with one that runs."""

import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from omnitrain.errors import ScheduleError
from omnitrain.plan import Placement
from omnitrain.plan.schedule.actions import Action, Kind, Schedule
from omnitrain.plan.schedule.encoders import with_encoders
from omnitrain.plan.schedule.generators import generate, gpipe, interleaved, one_f_one_b, zbv
from omnitrain.plan.schedule.lower import lower
from omnitrain.plan.schedule.validate import problems_in, validate
from tests.plan.schedule.as_text import read, text_of


def random_schedule(rng: random.Random) -> Schedule:
    p, v, m = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 6)
    compute = rng.choice(
        [
            gpipe(p, m),
            one_f_one_b(p, m, extra_warm_up=rng.randint(0, 2)),
            interleaved(p, v, m, group_size=rng.choice([None, p + 1])),
            zbv(p, m),
            interleaved(p, v, m, overlap=True),
        ]
    )
    return lower(compute, receives_ahead=rng.randint(0, 3), max_gathered=rng.choice([None, 1, 2]))


def runs(schedule: Schedule) -> bool:
    """Whether ranks that run their lists reach the end: each input there, sends blocking, messages in order."""
    at = [0] * schedule.num_ranks
    done: set[tuple[str, int | None, int | None]] = set()
    channels: dict[tuple[str, int, int], list[list[tuple[int, int]]]] = defaultdict(lambda: [[], []])
    gathered: set[int | None] = set()
    reduced: list[int | None] = []
    last = schedule.num_stages - 1

    def here(stage: int, rank: int) -> bool:
        return schedule.stage_ranks[stage] == rank

    def can_run(rank: int, part: Action) -> bool:
        s, k = part.stage, part.micro_batch
        if (part.kind, s, k) in done or not here(s, rank) or s not in gathered or s in reduced:
            return False
        if part.kind == "F":
            return s == 0 or (("F", s - 1, k) if here(s - 1, rank) else ("RECV_F", s, k)) in done
        if part.kind == "W":
            return ("I", s, k) in done
        needs_gradient = ("I", s + 1, k) if s < last and here(s + 1, rank) else ("RECV_B", s, k)
        return ("F", s, k) in done and (s == last or needs_gradient in done)

    def step(rank: int, action: Action) -> bool:
        s, k = action.stage, action.micro_batch
        if action.passes:
            if not all(can_run(rank, part) for part in action.passes):
                return False
            for part in action.passes:
                done.add((part.kind, part.stage, part.micro_batch))
                if part.kind == "B":
                    done.update((kind, part.stage, part.micro_batch) for kind in "IW")
        elif action.kind is Kind.UNSHARD:
            if s in gathered or not here(s, rank):
                return False
            gathered.add(s)
        elif action.kind is Kind.RESHARD:
            if s not in gathered or not here(s, rank):
                return False
            gathered.remove(s)
        elif action.kind is Kind.REDUCE:
            if (
                s in reduced
                or not here(s, rank)
                or any(("W", s, m) not in done for m in range(schedule.num_micro_batches))
            ):
                return False
            reduced.append(s)
        elif action.kind in (Kind.SEND_F, Kind.SEND_B):
            is_forward = action.kind is Kind.SEND_F
            sent, posted = channels[action.kind[-1], rank, action.peer]
            message = (s + (1 if is_forward else -1), k)
            if ("F" if is_forward else "I", s, k) not in done or not here(s, rank) or len(posted) <= len(sent):
                return False
            if posted[len(sent)] != message:
                return False
            sent.append(message)
            done.add((f"RECV_{action.kind[-1]}", *message))
        else:
            channels[action.kind[-1], action.peer, rank][1].append((s, k))
        at[rank] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while at[rank] < len(row) and step(rank, row[at[rank]]):
                moved = True
    is_at_end = at == list(map(len, schedule.actions)) and all(posted == sent for posted, sent in channels.values())
    return is_at_end and not gathered and sorted(reduced) == list(range(last + 1))


def mutated(rng: random.Random, schedule: Schedule, mutation: str) -> tuple[Action, Schedule]:
    rows = [list(row) for row in schedule.actions]
    rank = rng.randrange(len(rows))
    index = rng.randrange(len(rows[rank]))
    action = rows[rank][index] if mutation == "doubled" else rows[rank].pop(index)
    if mutation != "dropped":
        target = rows[rng.choice([rank, rank, rng.randrange(len(rows))])]
        target.insert(rng.randint(0, len(target)), action)
    return action, schedule.with_actions(rows)


@pytest.mark.parametrize("mutation", ["dropped", "doubled", "moved"])
@pytest.mark.parametrize("seed", range(10))
def test_one_action_dropped_doubled_or_moved_is_named_unless_the_schedule_still_runs(seed: int, mutation: str) -> None:
    rng = random.Random(f"{seed} {mutation}")
    for _ in range(12):
        schedule = random_schedule(rng)
        assert runs(schedule)
        assert problems_in(schedule) == ()
        action, changed = mutated(rng, schedule, mutation)
        problems = problems_in(changed)
        assert runs(changed) == (not problems), text_of(changed)
        assert mutation == "moved" or problems
        if problems:
            named = {named for problem in problems for named in problem.actions}
            assert {action, *action.passes} & named, (str(action), problems)
            assert all(f"rank {problem.rank}" in problem.message for problem in problems)


def test_a_forward_behind_its_backward_stops_the_rank_and_both_are_named() -> None:
    schedule = read("0UNSHARD,0B0,0F0,0REDUCE_GRAD,0RESHARD")
    assert [problem.message for problem in problems_in(schedule)] == [
        "the schedule stops: rank 0 waits at action 1, 0B0, for 0F0, action 2 of this rank"
    ]


def test_sends_that_wait_for_each_other_are_a_deadlock_of_both_ranks() -> None:
    late = "0F0,0SEND_F0>1,0F1,0SEND_F1>1,0RECV_B0<1,0B0,0RECV_B1<1,0B1"
    ahead = "0RECV_B0<1,0F0,0SEND_F0>1,0RECV_B1<1,0F1,0SEND_F1>1,0B0,0B1"
    last = "1RECV_F0<0,1F0,1B0,1SEND_B0>0,1RECV_F1<0,1F1,1B1,1SEND_B1>0"
    assert problems_in(read(f"{ahead}\n{last}")) == ()
    (problem,) = problems_in(read(f"{late}\n{last}"))
    assert problem.message == (
        "the schedule stops: rank 0 waits at action 3, 0SEND_F1>1, for 1RECV_F1<0, action 4 of rank 1; "
        "rank 1 waits at action 3, 1SEND_B0>0, for 0RECV_B0<1, action 4 of rank 0"
    )


def test_an_overlap_without_one_more_forward_of_warm_up_is_a_deadlock() -> None:
    for p, v in ((2, 2), (4, 2), (2, 3)):
        validate(interleaved(p, v, 2 * p, overlap=True), lowered=False)
        with pytest.raises(ScheduleError, match=r"the schedule stops: rank . waits at action .*OVERLAP_F_B, for"):
            validate(interleaved(p, v, 2 * p, overlap=True, extra_warm_up=-1), lowered=False)
    with pytest.raises(ScheduleError, match=r"waits at action 0, \(0F0;0B0\)OVERLAP_F_B, for .* of this rank"):
        validate(one_f_one_b(1, 4, overlap=True, extra_warm_up=-1), lowered=False)


def test_an_interleaved_schedule_without_its_warm_up_is_a_deadlock() -> None:
    with pytest.raises(ScheduleError, match="the schedule stops: rank 3 waits at action 3, 7B0, for 7F0, action 6 of"):
        lower(interleaved(4, 2, 8, extra_warm_up=-2))


def test_collectives_of_all_pipeline_ranks_come_in_one_order() -> None:
    schedule = lower(with_encoders(one_f_one_b(2, 2), [Placement("vision", (), window=1)]))
    update = Action.parse("OPTIMIZER")
    good = schedule.with_actions((*row, update) for row in schedule.actions)
    assert problems_in(good) == ()
    first, second = good.actions
    (problem,) = problems_in(good.with_actions([first, second[:-1]]))
    assert problem.message == (
        "collective 6 of all pipeline ranks is missing on rank 1 and OPTIMIZER on rank 0; "
        "all ranks must have the same ones in the same order"
    )
    exchange, encode = Action.parse("EXCHANGE0@vision"), Action.parse("ENCODE0@vision")
    others = [action for action in second if action != exchange]
    swapped = good.with_actions([first, (exchange, *others)])
    assert [problem.actions for problem in problems_in(swapped)] == [(exchange, encode)]
    late = good.with_actions([first, (*others[:-1], exchange, update)])  # after forwards that rank 0 waits for
    assert problems_in(late)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_encoders_run_when_the_first_stage_has_what_they_need(kind: str, window: int) -> None:
    chunks = {"interleaved": 3, "zbv": 2}.get(kind, 1)
    encoders = [Placement("vision", (), window=window), Placement("audio", (), window=8, is_trained=False)]
    schedule = lower(with_encoders(generate(kind, 4, 8, num_chunks=chunks), encoders))
    assert problems_in(schedule) == ()
    texts = [str(action) for action in schedule.actions[0]]
    windows = -(-8 // window)
    assert len(problems_in(schedule.with_actions(map(without("ENCODE_B0@vision"), schedule.actions))))
    assert sum(text.startswith("ENCODE_B") for text in texts) == windows
    assert texts.count("REDUCE_GRAD@vision") == 1 and texts.count("REDUCE_GRAD@audio") == 0
    assert texts.count("UNSHARD@vision") == 2 * windows and texts.count("UNSHARD@audio") == 1


def without(text: str) -> Callable[[tuple[Action, ...]], list[Action]]:
    return lambda row: [action for action in row if str(action) != text]


def test_a_forward_before_its_features_is_named() -> None:
    schedule = lower(with_encoders(one_f_one_b(2, 2), [Placement("vision", (), window=1)]))
    rows = []
    for row in schedule.actions:
        exchange = row.index(Action.parse("EXCHANGE1@vision"))
        last = max(index for index, action in enumerate(row) if action.kind is Kind.F)
        rows.append([*row[:exchange], *row[exchange + 1 : last + 1], row[exchange], *row[last + 1 :]])
    messages = [problem.message for problem in problems_in(schedule.with_actions(rows))]
    assert "expected ENCODE1@vision, EXCHANGE1@vision, 0F1, 0B1, ENCODE_B1@vision, each once" in " ".join(messages)


def test_a_schedule_without_sends_is_not_one_that_ranks_can_run() -> None:
    schedule = one_f_one_b(2, 1)
    assert problems_in(schedule, lowered=False) == ()
    assert [str(problem.actions[0]) for problem in problems_in(schedule)] == [
        "0SEND_F0>1",
        "1RECV_F0<0",
        "1SEND_B0>0",
        "0RECV_B0<1",
    ]
    with pytest.raises(ScheduleError, match="0SEND_F0>1 is missing"):
        validate(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,1F0,1B0,1W0", "is there as I or W, too"),
        ("0F0,0B0,1F0,1B0,0SEND_F0>0", "stage 0 is on rank 0, stage 1 on 0, so nothing is sent between them"),
        ("0F0,0B0,1F0,1B0,7SEND_F0>0", "no such stage; stages are 0 to 1"),
        ("0F0,0B0,1F0,1B0,0B7", "no such micro-batch; micro-batches are 0 to 0"),
        ("0F0,1F0,1B0,0B0,0F0", "rank 0, action 0, 0F0: is there again as action 4 of rank 0"),
    ],
)
def test_an_action_that_does_not_belong_says_why(text: str, message: str) -> None:
    assert message in "\n".join(problem.message for problem in problems_in(read(text)))
