"""Check a timeline against every rule of a step with sections, without the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from omnitrain.plan.wavefront.feeds import Wavefront
from omnitrain.plan.wavefront.simulate import WavefrontTimeline

_CLOSE = 1e-9


def require_valid(wave: Wavefront, timeline: WavefrontTimeline) -> None:
    """Raise unless a timeline obeys all rules of :class:`Wavefront`.

    Raises:
        ValueError: the first rule that it breaks, with sample and seconds.
    """
    (_require_lanes_with_sinks if wave.sinks else _require_lanes)(wave, timeline)
    for index in range(len(wave.sinks)):
        _require_losses(wave, timeline, index)
    for index in range(len(wave.feeders)):
        _require_each_once(wave, timeline, index)
        _require_order(wave, timeline, index)
        _require_limits(wave, timeline, index)


def _require_lanes(wave: Wavefront, timeline: WavefrontTimeline) -> None:
    for lane, samples in enumerate(wave.lanes_of(sorted(range(wave.num_samples), key=timeline.start.__getitem__))):
        for sample, follower in zip(samples, [*samples[1:], None], strict=True):
            end = timeline.start[sample] + wave.work[sample]
            if timeline.end[sample] < end - _CLOSE or (not wave.coupled and timeline.end[sample] > end + _CLOSE):
                raise ValueError(f"lane {lane}: sample {sample} ends at {timeline.end[sample]}; expected {end}")
            if follower is not None and timeline.start[follower] < timeline.end[sample] - _CLOSE:
                raise ValueError(f"lane {lane}: samples {sample} and {follower} overlap")


def _require_lanes_with_sinks(wave: Wavefront, timeline: WavefrontTimeline) -> None:
    """Check each forward and backward, and that a lane runs as many further forwards as it should, and no more."""
    for samples in wave.lanes_of(sorted(range(wave.num_samples), key=timeline.start.__getitem__)):
        passes = [
            pair
            for s in samples
            for pair in ((timeline.start[s], timeline.turn[s]), (timeline.back[s], timeline.end[s]))
        ]
        _require_in_turn(sorted(passes), "a lane")
        for index, s in enumerate(samples):
            forward, backward = timeline.turn[s] - timeline.start[s], timeline.end[s] - timeline.back[s]
            if forward < wave.work[s] / 3 - _CLOSE or backward < 2 * wave.work[s] / 3 - _CLOSE:
                raise ValueError(f"sample {s} takes {forward} and {backward} seconds, less than its work")
            ahead = samples[index + 1 + wave.extra_forwards :][:1]
            if any(timeline.start[other] < timeline.end[s] - _CLOSE for other in ahead):
                raise ValueError(f"sample {ahead[0]} begins before the backward of {s} ends")
            if any(timeline.turn[o] > timeline.back[s] + _CLOSE for o in samples[index:][: 1 + wave.extra_forwards]):
                raise ValueError(f"the backward of {s} begins before {wave.extra_forwards} further forwards")


def _require_losses(wave: Wavefront, timeline: WavefrontTimeline, index: int) -> None:
    """Check that a sink computes each loss once, between forward and backward, in the order of the forwards' ends."""
    actions, seconds = timeline.sinks[index], wave.sinks[index].seconds
    expected = sorted(s for s, found in enumerate(wave.predicted) if index in found)
    if sorted(sample for sample, _, _ in actions) != expected:
        raise ValueError(f"sink {index} does not compute each loss once")
    turns = [timeline.turn[sample] for sample, _, _ in actions]
    if turns != sorted(turns):
        raise ValueError(f"sink {index} does not compute losses in the order of the forwards")
    _require_in_turn([(start, end) for _, start, end in actions], f"sink {index}")
    for sample, start, end in actions:
        if abs(end - start - seconds[sample]) > _CLOSE or start < timeline.turn[sample] or end > timeline.back[sample]:
            raise ValueError(f"sink {index}: sample {sample} from {start} to {end} is not between forward and backward")


def _require_in_turn(spans: Sequence[tuple[float, float]], who: str) -> None:
    for (_, end), (start, _) in pairwise(spans):
        if start < end - _CLOSE:
            raise ValueError(f"{who} begins something at {start}, before {end}")


def _require_each_once(wave: Wavefront, timeline: WavefrontTimeline, index: int) -> None:
    backwards = wave.feeders[index].backwards
    fed = [s for s in range(wave.num_samples) if index in wave.needs[s]]
    expected = sorted([(s, False) for s in fed] + [(s, True) for s in fed if backwards[s] > 0])
    if sorted((sample, is_backward) for sample, is_backward, _, _ in timeline.feeders[index]) != expected:
        raise ValueError(f"feeder {index} does not run each forward and backward once")


def _require_order(wave: Wavefront, timeline: WavefrontTimeline, index: int) -> None:
    """Check that one action follows the other, a sample's lane its forward, and its backward the lane."""
    feeder, free = wave.feeders[index], 0.0
    for sample, is_backward, start, end in timeline.feeders[index]:
        seconds = (feeder.backwards if is_backward else feeder.forward)[sample]
        _require(start >= free - _CLOSE, index, f"sample {sample} begins before the action before it ends")
        _require(abs(end - start - seconds) < _CLOSE, index, f"sample {sample} does not take {seconds}")
        if is_backward:
            _require(start >= timeline.end[sample] - _CLOSE, index, f"backward of sample {sample} before its lane's")
        else:
            _require(timeline.start[sample] >= end - _CLOSE, index, f"sample {sample} begins before it is encoded")
        free = end


def _require_limits(wave: Wavefront, timeline: WavefrontTimeline, index: int) -> None:
    """Check that whenever a forward begins, a slot is free and its activations may be kept."""
    feeder, actions = wave.feeders[index], timeline.feeders[index]
    begun = {sample: start for sample, is_backward, start, _ in actions if not is_backward}
    ended = {sample: end for sample, is_backward, _, end in actions if is_backward}
    for sample, time in begun.items():
        earlier = [s for s in begun if begun[s] <= time and s != sample]
        waiting = [s for s in earlier if wave.lane[s] == wave.lane[sample] and timeline.start[s] > time + _CLOSE]
        _require(len(waiting) < feeder.slots, index, f"{len(waiting)} samples wait when sample {sample} begins")
        kept = [s for s in earlier if s in ended and ended[s] > time + _CLOSE]
        _require(len(kept) < feeder.keeps, index, f"{len(kept)} samples are kept when sample {sample} begins")


def _require(holds: bool, feeder: int, problem: str) -> None:
    if not holds:
        raise ValueError(f"feeder {feeder}: {problem}")
