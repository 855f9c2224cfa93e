"""Recording what ran when."""

from __future__ import annotations

import pytest
import torch

from omnitrain.ops.timing import SpanRecorder, What

PRODUCT = What("compute", "experts", "forward", "layer")


def test_nothing_is_recorded_outside_of_begin_and_end() -> None:
    recorder = SpanRecorder()
    recorder.add(PRODUCT, recorder.mark(), recorder.mark())
    recorder.begin()
    start = recorder.mark()
    recorder.add(PRODUCT, start, start + 0.5)
    recorded = recorder.end()
    recorder.add(PRODUCT, recorder.mark(), recorder.mark())
    assert [span.what for span in recorded.spans] == [PRODUCT]
    assert recorded.spans[0].seconds == pytest.approx(0.5) and 0 <= recorded.spans[0].start <= recorded.seconds
    recorder.begin()
    assert recorder.end().spans == ()


class FakeEvent:
    """Of a device that takes a millisecond from one event to the next, and is read when it is through."""

    log: list[str]
    recorded: int

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.recorded
        FakeEvent.recorded += 1
        FakeEvent.log.append("record")

    def synchronize(self) -> None:
        FakeEvent.log.append("synchronize")

    def elapsed_time(self, later: FakeEvent) -> float:
        FakeEvent.log.append("read")
        return float(later.at - self.at)


def test_a_device_is_waited_for_once_and_behind_the_last_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.log, FakeEvent.recorded = [], 0
    recorder = SpanRecorder("cuda")
    recorder.begin()
    marks = [recorder.mark() for _ in range(3)]
    recorder.add(PRODUCT, marks[0], marks[2])
    assert FakeEvent.log == 4 * ["record"]
    recorded = recorder.end()
    assert FakeEvent.log[4:6] == ["record", "synchronize"] and set(FakeEvent.log[6:]) == {"read"}
    assert [(span.start, span.end) for span in recorded.spans] == [(0.001, 0.003)] and recorded.seconds == 0.004
