"""What a step of a dense model is made of on the device: its kernels, the gaps between them, and its memory.

Beside the result lie a trace (for ui.perfetto.dev) and, of a GPU, snapshots of its memory (for pytorch.org/memory_viz).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.batches import batches_of
from gpu.measured import NEEDS_CUDA, WARM_UP, Figures, Load, free_memory, synchronize
from gpu.sides import laid_out, packs_of
from gpu.sizes import config_of, layers_that_fit, sizes_of
from omnitrain.recipe import Ops
from omnitrain.recipe.parallel import ComponentPlan

MOST_LAYERS, TOKENS = 4, 8192
SHOWN = 20  # kernels in the table
LEAST_GAP = 50.0  # microseconds
ENTRIES = 20_000  # of the memory's history

Span = tuple[str, float, float]
"""Name, start and end in microseconds."""


def run(tiny: bool, folder: Path) -> Figures:
    """Yield the share of each kernel, gaps, and memory with and without expandable segments."""
    load, sizes = Load.of(tiny, TOKENS), sizes_of("text", tiny)
    config = config_of("text", sizes, layers_that_fit("text", sizes, load, MOST_LAYERS))
    batches = batches_of("text", sizes, config, load)
    is_gpu = load.device.type == "cuda"
    with laid_out(config, load.device, ComponentPlan(), Ops()) as step:
        packs = packs_of(step, batches)
        for pack in packs[:WARM_UP]:
            step.run([pack])
        synchronize(load.device)
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * is_gpu)]) as profiled:
            step.run([packs[-1]])
            synchronize(load.device)
    profiled.export_chrome_trace(str(folder / "trace.json.gz"))
    yield from of_spans(spans_of(profiled, is_gpu))
    for expandable in (True, False):
        yield from memory(expandable, folder, load, config, batches)


def spans_of(profiled: profile, is_gpu: bool) -> list[Span]:
    """Return the kernels and copies of a GPU; of a CPU, operations that call no other one."""
    wanted = torch.autograd.DeviceType.CUDA if is_gpu else torch.autograd.DeviceType.CPU
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type == wanted and not event.cpu_children and not event.is_user_annotation
    ]


def of_spans(spans: Iterable[Span]) -> Figures:
    """Yield time and calls of the longest kernels, and the gaps in which none runs."""
    spans = sorted(spans, key=lambda span: span[1])
    seconds, calls = Counter[str](), Counter(name for name, *_ in spans)
    for name, start, end in spans:
        seconds[name] += end - start
    found = gaps(spans)
    yield "step ms", 1e-3 * (max(end for *_, end in spans) - spans[0][1])
    yield "kernels", float(len(spans))
    yield f"gaps above {LEAST_GAP:.0f} us", float(len(found))
    yield f"gaps above {LEAST_GAP:.0f} us, ms", 1e-3 * sum(gap for gap, _ in found)
    for number, (gap, before) in enumerate(sorted(found, reverse=True)[:5], start=1):
        yield f"gap {number}, us, after {before[:100]}", gap
    for number, (name, spent) in enumerate(seconds.most_common(SHOWN), start=1):  # long names may begin alike
        yield f"kernel {number}, ms in {calls[name]} x {name[:100]}", 1e-3 * spent


def gaps(spans: list[Span]) -> list[tuple[float, str]]:
    """Return gaps of at least :data:`LEAST_GAP` microseconds, and the name of what ran last; spans may overlap."""
    found, last, until = [], "", spans[0][1]
    for name, start, end in spans:
        if start - until >= LEAST_GAP:
            found.append((start - until, last))
        if end >= until:
            last, until = name, end
    return found


def memory(
    expandable: bool, folder: Path, load: Load, config: object, batches: list[list[dict[str, object]]]
) -> Figures:
    """Yield the peak of a few steps over packs of different sizes, and what the allocator reserved for it."""
    words = "expandable segments" if expandable else "fixed segments"
    if load.device.type != "cuda":
        yield f"allocated MiB, {words}", NEEDS_CUDA
        yield f"reserved MiB, {words}", NEEDS_CUDA
        return
    free_memory(load.device)
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")
    with laid_out(config, load.device, ComponentPlan(), Ops()) as step:
        for pack in packs_of(step, batches):
            step.run([pack])
        torch.cuda.memory._dump_snapshot(str(folder / f"memory-{words.partition(' ')[0]}.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)
    yield f"allocated MiB, {words}", torch.cuda.max_memory_allocated(load.device) / 2**20
    yield f"reserved MiB, {words}", torch.cuda.max_memory_reserved(load.device) / 2**20
