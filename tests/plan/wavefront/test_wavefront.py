from dataclasses import replace
from itertools import permutations, product
from random import Random

import pytest

from omnitrain.plan.wavefront.feeds import Feeder, Sink, Wavefront
from omnitrain.plan.wavefront.search import best_order, lower_bound
from omnitrain.plan.wavefront.simulate import makespan, simulate
from omnitrain.plan.wavefront.step import deal
from tests.plan.wavefront.instances import random_wave, with_sinks
from tests.plan.wavefront.validate import require_valid


def test_the_best_of_few_orders_is_found_that_of_many_within_5_percent_and_no_bound_is_above_it():
    ratios = []
    for seed in range(40):
        random = Random(seed)
        wave = random_wave(random, 6, random.choice((1, 2, 3)), feeders=random.choice((1, 2)), coupled=seed % 4 == 3)
        shortest = min(makespan(wave, order) for order in permutations(range(6)))
        assert lower_bound(wave) <= shortest + 1e-9
        assert makespan(wave, best_order(wave)) == pytest.approx(shortest, rel=1e-9)
        ratios.append(makespan(wave, best_order(wave, budget=6 * 719)) / shortest)  # fewer than there are orders
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.05
    assert sum(ratios) / len(ratios) <= 1.005


def lists_of_a_feeder(forwards, kept=()):
    """All orders of a feeder's actions in which forwards follow an order, and each backward follows its forward."""
    if not forwards and not kept:
        yield ()
    if forwards:
        for rest in lists_of_a_feeder(forwards[1:], (*kept, forwards[0])):
            yield ((forwards[0], False), *rest)
    for sample in kept:
        for rest in lists_of_a_feeder(forwards, tuple(s for s in kept if s != sample)):
            yield ((sample, True), *rest)


def seconds_of_a_list(wave, order, actions):
    """The seconds of a step in which the one feeder runs ``actions`` in this order; None: its limits forbid them."""
    feeder, free, lanes = wave.feeders[0], 0.0, wave.lanes_of(order)
    start, end, encoded, kept = {}, {}, {}, 0
    for sample, is_backward in (*actions, (None, None)):
        for lane in lanes:  # run lanes as far as they come
            time = 0.0
            for s in lane:
                if feeder.forward[s] > 0 and s not in encoded:
                    break
                start[s] = max(time, encoded.get(s, 0.0))
                time = end[s] = start[s] + wave.work[s]
        if sample is None:
            return max([free, *end.values()])
        if is_backward:
            free = max(free, end.get(sample, 0.0)) + feeder.backwards[sample]
            kept -= 1
            continue
        mine = [s for s in encoded if wave.lane[s] == wave.lane[sample]]
        if len(mine) >= feeder.slots:
            free = max(free, start[mine[-feeder.slots]])
        kept += 1
        if kept > feeder.keeps:
            return None
        encoded[sample] = free = free + feeder.forward[sample]
    raise AssertionError


def test_a_feeder_that_prefers_forwards_loses_nothing_against_any_list_of_its_actions():
    for seed in range(12):
        random = Random(seed)
        wave = random_wave(random, 4, random.choice((1, 2)))
        forward = [random.uniform(0.1, 1.5) for _ in range(4)]
        feeder = replace(wave.feeders[0], forward=forward, backward=[2 * f for f in forward], encode_twice=False)
        wave = replace(wave, feeders=(feeder,))
        orders = list(permutations(range(4)))
        lists = (seconds_of_a_list(wave, order, row) for order in orders for row in lists_of_a_feeder(order))
        assert min(makespan(wave, order) for order in orders) == pytest.approx(min(filter(None, lists)), rel=1e-9)


@pytest.mark.parametrize("coupled", [False, True])
def test_every_order_ends_and_its_timeline_obeys_all_rules(coupled):
    for seed in range(60):
        random = Random(seed)
        lanes = random.choice((1, 2, 4))
        wave = random_wave(random, 12, lanes, feeders=random.choice((1, 2, 3)), coupled=coupled)
        order = random.sample(range(12), 12)
        timeline = simulate(wave, order)
        require_valid(wave, timeline)
        assert timeline.makespan >= lower_bound(wave) - 1e-9


@pytest.mark.parametrize("coupled", [False, True])
def test_every_order_with_sinks_ends_and_its_timeline_obeys_all_rules(coupled):
    for seed in range(60):
        random = Random(f"sinks {seed}")
        lanes, feeders = random.choice((1, 2, 4)), random.choice((0, 1, 2))
        wave = with_sinks(
            random, random_wave(random, 12, lanes, feeders=feeders, coupled=coupled), random.choice((1, 2))
        )
        timeline = simulate(wave, random.sample(range(12), 12))
        require_valid(wave, timeline)
        assert timeline.makespan >= lower_bound(wave) - 1e-9


def test_of_few_orders_with_sinks_the_best_is_found_and_no_bound_is_above_it():
    ratios = []
    for seed in range(24):
        random = Random(f"few {seed}")
        wave = random_wave(random, 6, random.choice((1, 2, 3)), feeders=random.choice((0, 1)), coupled=seed % 4 == 3)
        wave = with_sinks(random, wave, random.choice((1, 2)))
        shortest = min(makespan(wave, order) for order in permutations(range(6)))
        assert lower_bound(wave) <= shortest + 1e-9
        ratios.append(makespan(wave, best_order(wave, budget=12 * 200)) / shortest)
    assert min(ratios) >= 1 - 1e-9 and max(ratios) <= 1.05 and sum(ratios) / len(ratios) <= 1.01


@pytest.mark.parametrize(
    ("work", "losses", "shortest"),
    [
        ([0.01, 3.0, 0.01], [[1.0, 0.0, 2.0]], 3.02),  # one long sample hides the losses of both others
        ([0.1, 0.1], [[1.0, 0.0], [0.0, 1.0]], 1.2 - 0.1 / 3),  # two sinks compute at once
    ],
)
def test_no_bound_is_above_losses_that_hide_behind_each_other_or_one_long_sample(work, losses, shortest):
    sinks = tuple(Sink(seconds, (0,)) for seconds in losses)
    wave = Wavefront(work, [0] * len(work), 1, (), sinks=sinks, extra_forwards=1)
    assert makespan(wave, best_order(wave)) == pytest.approx(shortest)
    assert lower_bound(wave) <= shortest + 1e-9


def test_a_sink_that_keeps_up_costs_its_losses_alone_and_nothing_beside_a_further_forward():
    wave = Wavefront([3.0] * 8, [s % 2 for s in range(8)], 2, (), sinks=(Sink([0.5] * 8, (0, 1)),))
    assert makespan(wave, range(8)) == lower_bound(wave) + 0.5  # both lanes send at once, the second one waits first
    assert lower_bound(wave) == 4 * 3.5
    assert makespan(replace(wave, extra_forwards=1), range(8)) == 4 * 3.0


def test_the_validator_names_each_broken_rule():
    feeder = Feeder([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], (0,), slots=1, in_flight=1)
    wave = Wavefront([3.0, 3.0, 3.0], [0, 0, 0], 1, (feeder,))
    good = simulate(wave, [0, 1, 2])

    def broken(**changes):
        with pytest.raises(ValueError) as error:
            require_valid(wave, replace(good, **changes))
        return str(error.value)

    actions = good.feeders[0]
    assert broken(feeders=[actions[:-1]]) == "feeder 0 does not run each forward and backward once"
    assert "begins before the action before it ends" in broken(feeders=[[(s, b, t - 0.5, e) for s, b, t, e in actions]])
    assert "does not take 1.0" in broken(feeders=[[(s, b, t, e - 0.25) for s, b, t, e in actions[:1]] + actions[1:]])
    assert "begins before it is encoded" in broken(start=[0.0, *good.start[1:]], end=[3.0, *good.end[1:]])
    assert "backward of sample 0 before its lane's" in broken(end=[99.0, *good.end[1:]], start=[96.0, *good.start[1:]])
    assert "overlap" in broken(start=[*good.start[:2], good.end[1] - 1], end=[*good.end[:2], good.end[1] + 2])
    loose = replace(wave, feeders=(replace(feeder, slots=3, in_flight=3),))
    tight = [replace(wave, feeders=(replace(feeder, slots=3),)), replace(wave, feeders=(replace(feeder, in_flight=3),))]
    for other, words in zip(tight, ("samples are kept", "samples wait"), strict=True):
        with pytest.raises(ValueError, match=words):
            require_valid(other, simulate(loose, [0, 1, 2]))


def test_a_frozen_feeder_of_one_lane_is_as_good_as_johnsons_rule():
    for seed in range(20):
        random = Random(seed)
        wave = random_wave(random, 7, 1)
        forward = [random.uniform(0.1, 3.0) for _ in range(7)]
        wave = replace(wave, feeders=(Feeder(forward, [0.0] * 7, (0,), slots=7),))
        first = sorted((s for s in range(7) if forward[s] <= wave.work[s]), key=lambda s: forward[s])
        last = sorted((s for s in range(7) if forward[s] > wave.work[s]), key=lambda s: -wave.work[s])
        assert makespan(wave, best_order(wave)) == pytest.approx(makespan(wave, [*first, *last]), rel=1e-9)


def test_a_trained_feeder_that_encodes_twice_is_not_held_up_by_activations():
    samples = 16
    forward = [0.25] * samples
    held = Feeder(forward, [0.5] * samples, (0, 1, 2, 3), slots=4, in_flight=2)
    wave = Wavefront([3.0] * samples, [s % 4 for s in range(samples)], 4, (held,))
    twice = replace(wave, feeders=(replace(held, encode_twice=True),))
    assert lower_bound(wave) == 30.0  # 16 chains of 3.75 s, two at a time
    assert makespan(wave, best_order(wave)) >= 30.0
    assert makespan(twice, best_order(twice)) <= 16.5  # 16 samples of one second of the feeder, and one head


def test_twelve_samples_of_four_lanes_take_no_longer_than_text_alone_if_they_are_dealt():
    """A step like Figure 7 of arXiv 2605.10501.

    Known of the figure: 12 samples, fan-out 4, and 4 of the samples, which are not used here. Assumed: all samples.
    Each takes 3 seconds of its lane, and 4 have media for a trained encoder.
    """
    work, forward = [3.0] * 12, [0.3, 0, 0, 0, 0, 0.3, 0.2, 0, 0.2, 0, 0, 0]
    backward = [2 * seconds for seconds in forward]
    feeder = Feeder(forward, backward, (0, 1, 2, 3), slots=2)
    drawn = Wavefront(work, [s % 4 for s in range(12)], 4, (feeder,))
    dealt = replace(drawn, lane=deal(work, [f + b for f, b in zip(forward, backward, strict=True)], 4))
    # Lane 0 has samples 0, 4 and 8. It waits for the forward of 0, and the backward of 8 follows its end.
    assert makespan(drawn, range(12)) == pytest.approx(9.0 + 0.3 + 0.4)
    # Two of its three samples have media, so one is first or last: at best, it waits for the lighter forward.
    assert makespan(drawn, best_order(drawn)) == pytest.approx(9.0 + 0.2)
    orders = (  # all that differ: text-only samples of lanes 1 to 3 do not use the feeder
        [*(1, 9)[:i], *(2, 10)[:j], *order, *(1, 9)[i:], *(2, 10)[j:], 3, 7, 11]
        for i, j, order in product(range(3), range(3), permutations((0, 4, 8, 5, 6)))
    )
    assert min(makespan(drawn, order) for order in orders) == pytest.approx(9.0 + 0.2)
    # One on each lane, in the middle: all forwards take 1 s of the first 3 s, all backwards 2 s of the last 3 s.
    assert makespan(dealt, best_order(dealt)) == pytest.approx(9.0)  # text alone: three samples of three seconds


def test_a_feeder_that_keeps_one_sample_per_lane_has_one_at_work_almost_always():
    """Its bound is the seconds of all samples, four at a time. Samples come back from lanes at different times."""
    random = Random(0)
    work = [3 * random.lognormvariate(0, 0.4) for _ in range(256)]
    forward = [0.2 * random.lognormvariate(0, 0.5) for _ in range(256)]
    feeder = Feeder(forward, [2 * f for f in forward], (0, 1, 2, 3), in_flight=4)
    wave = Wavefront(work, [s % 4 for s in range(256)], 4, (feeder,))
    assert lower_bound(wave) == pytest.approx((sum(work) + 3 * sum(forward)) / 4)
    assert makespan(wave, best_order(wave)) < 1.03 * lower_bound(wave)
    assert makespan(wave, range(256)) > 1.1 * lower_bound(wave)


@pytest.mark.parametrize("seed", [17, 26, 27])
def test_text_of_a_lane_hides_the_heavy_videos_that_follow_it(seed):
    random = Random(seed)
    work = [3 * random.lognormvariate(0, 0.4) for _ in range(64)]
    images, videos = ([random.lognormvariate(*law) for _ in range(n)] for law, n in (((0, 0.4), 17), ((2, 0.5), 12)))
    forward = [0.0] * 35 + images + videos
    scale = 0.95 * sum(work) / sum(forward)
    wave = Wavefront(work, [0] * 64, 1, (Feeder([scale * f for f in forward], [0.0] * 64, (0,)),))
    assert makespan(wave, best_order(wave)) < 1.015 * lower_bound(wave)


def test_coupled_lanes_get_samples_of_like_length_in_a_round():
    random = Random(0)
    work = [random.lognormvariate(0.0, 0.4) for _ in range(128)]
    drawn = Wavefront(work, [s % 8 for s in range(128)], 8, (), coupled=True)
    dealt = replace(drawn, lane=deal(work, [0.0] * 128, 8, coupled=True))
    by_length = sorted(range(128), key=lambda s: -work[s])
    mean = sum(work) / 8
    assert makespan(drawn, range(128)) / mean > 1.4
    assert makespan(dealt, by_length) == pytest.approx(lower_bound(dealt))
    assert makespan(dealt, by_length) / mean < 1.1


def test_the_loads_of_feeders_are_dealt_evenly_and_lanes_get_equal_numbers():
    random = Random(1)
    work = [random.uniform(1, 3) for _ in range(64)]
    load = [random.uniform(1, 5) if s % 3 == 0 else 0.0 for s in range(64)]
    lane = deal(work, load, 4)
    assert [lane.count(k) for k in range(4)] == [16] * 4
    loads = [sum(load[s] for s in range(64) if lane[s] == k) for k in range(4)]
    works = [sum(work[s] for s in range(64) if lane[s] == k) for k in range(4)]
    assert max(loads) / (sum(loads) / 4) < 1.05
    assert max(works) / (sum(works) / 4) < 1.05


def test_the_order_is_the_same_in_each_process_and_a_step_without_samples_has_none():
    wave = random_wave(Random(5), 40, 4, feeders=2)
    assert best_order(wave) == best_order(wave)
    assert best_order(Wavefront([], [], 2, ())) == []


def test_limits_below_one_and_coupled_lanes_of_unequal_numbers_are_refused():
    with pytest.raises(ValueError, match="slots 0"):
        Wavefront([1.0], [0], 1, (Feeder([1.0], [0.0], (0,), slots=0),))
    with pytest.raises(ValueError, match="in_flight 0"):
        Wavefront([1.0], [0], 1, (Feeder([1.0], [0.0], (0,), in_flight=0),))
    with pytest.raises(ValueError, match="coupled"):
        Wavefront([1.0] * 3, [0, 0, 1], 2, (), coupled=True)
    with pytest.raises(ValueError, match="in_flight 1: expected at least 2, one per lane"):
        Wavefront([1.0] * 2, [0, 1], 2, (Feeder([1.0] * 2, [1.0] * 2, (0, 1), in_flight=1),), coupled=True)


def dealt_by_comparing_all_lanes(work, load, num_lanes, coupled):
    """What ``deal`` returns: each sample goes to the lane with the least so far, found by looking at all of them."""
    lane, sums = [0] * len(work), [(0.0, 0.0)] * num_lanes
    longest_first = sorted(range(len(work)), key=lambda s: (-work[s], s))
    rounds = [longest_first[i : i + num_lanes] for i in range(0, len(work), num_lanes)]
    batches = rounds if coupled else [[s for s in longest_first if (load[s] > 0) == is_fed] for is_fed in (True, False)]
    room = [len(range(k, len(work), num_lanes)) for k in range(num_lanes)]
    if coupled:
        room = [len(rounds)] * num_lanes
    for number, batch in enumerate(batches):
        taken = set()
        for sample in sorted(batch, key=lambda s: -load[s]):
            free = [k for k in range(num_lanes) if room[k] and not (coupled and k in taken)]
            chosen = min(free, key=lambda k: (sums[k] if coupled or number == 0 else sums[k][::-1], k))
            taken.add(chosen)
            lane[sample], room[chosen] = chosen, room[chosen] - 1
            sums[chosen] = (sums[chosen][0] + load[sample], sums[chosen][1] + work[sample])
    return lane


@pytest.mark.parametrize("coupled", [False, True])
def test_samples_are_dealt_to_the_lane_with_the_least(coupled):
    for seed in range(60):
        random = Random(seed)
        num_lanes = random.randint(1, 9)
        work = [
            float(random.randint(1, 5)) for _ in range(num_lanes * random.randint(0, 5) + random.randrange(num_lanes))
        ]
        load = [max(0.0, random.randint(-3, 5) / 2) for _ in work]
        expected = dealt_by_comparing_all_lanes(work, load, num_lanes, coupled)
        assert deal(work, load, num_lanes, coupled=coupled) == expected
