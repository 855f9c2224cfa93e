"""Peak memory on CPU, as torch's profiler sees the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of tensors that ``work`` holds at once."""
    gc.collect()  # garbage of earlier tests that is freed during `work` would be subtracted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))
