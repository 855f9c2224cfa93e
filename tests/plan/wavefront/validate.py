"""Check a timeline against every rule of a step with sections, without the simulator."""

from __future__ import annotations

from omnitrain.plan.wavefront.feeds import Wavefront
from omnitrain.plan.wavefront.simulate import WavefrontTimeline

_CLOSE = 1e-9


def require_valid(wave: Wavefront, timeline: WavefrontTimeline) -> None:
    """Raise unless a timeline obeys all rules of :class:`Wavefront`.

    Raises:
        ValueError: the first rule that it breaks, with sample and seconds.
    """
    _require_lanes(wave, timeline)
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
