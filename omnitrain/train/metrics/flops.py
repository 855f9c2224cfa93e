"""The FLOPs of a run's steps, and their share of what the devices could compute (MFU)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from omnitrain.models.omni.flops import ModelFlops, PackFlops
from omnitrain.models.omni.named_parameters import freeze
from omnitrain.ops.experts.routers import find_router
from omnitrain.ops.experts.weights import experts_in
from omnitrain.ops.flops import Recomputed
from omnitrain.parallel.fsdp.units import find_units
from omnitrain.parallel.layout import ModelLayout
from omnitrain.parallel.memory.recompute import attention_modules
from omnitrain.parallel.step.media_dispatch import StepBatch
from omnitrain.peers import Peers
from omnitrain.plan import Topology
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan

# Part of the device's name -> bf16 products of dense matrices, FLOPs per second, and its data sheet at nvidia.com. The
# first match counts. The figures of the sheets are for sparse matrices where they say so, twice as high.
_BY_NAME = (
    ("H200 NVL", 835e12, "H200 data sheet"),
    ("H200", 989e12, "H200 data sheet"),
    ("H100 NVL", 835e12, "H100 data sheet"),
    ("H100 PCIe", 756e12, "H100 data sheet"),
    ("H100", 989e12, "H100 data sheet"),
    ("A100", 312e12, "A100 data sheet"),
    ("B200", 2250e12, "B200 data sheet"),
    ("L40S", 362e12, "L40S data sheet"),
)
_SIDE = {"cpu": 512, "cuda": 8192}  # of the matrices that are multiplied
_TRIALS = 5


@dataclass(frozen=True)
class Peak:
    """The most FLOPs per second of a device, and where the figure is from."""

    flops: float
    source: str


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak of ``device`` in products of ``dtype``; unless a data sheet has it, multiply matrices to see."""
    has_sheet = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if has_sheet and (sheet := of_data_sheet(torch.cuda.get_device_name(device))) is not None:
        return sheet
    side = _SIDE[device.type]
    left, right = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    seconds = min(_seconds(left, right) for _ in range(_TRIALS))
    words = str(dtype).removeprefix("torch.")
    return Peak(2 * side**3 / seconds, f"measured: the fastest of {_TRIALS} products of {side} x {side} in {words}")


def of_data_sheet(name: str) -> Peak | None:
    """Return the bf16 peak of the device that torch calls ``name``; None: it is not known."""
    return next((Peak(flops, sheet) for part, flops, sheet in _BY_NAME if part in name), None)


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    began = time.perf_counter()
    _ = left @ right
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - began


def follow_plan(counter: ModelFlops, plans: Mapping[str, ComponentPlan]) -> None:
    """Count what the complete plans freeze as frozen, and what they recompute as computed again."""
    model = counter.model
    freeze(model, [name for name, plan in plans.items() if plan.freeze])
    blocks = {name: units.blocks for name, units in find_units(model).items()}
    counter.follow(
        [name for name, parameter in model.named_parameters() if parameter.requires_grad],
        {name: found for name, plan in plans.items() if (found := _recomputed(model, plan, blocks[name])) is not None},
    )


def _recomputed(model: torch.nn.Module, plan: ComponentPlan, blocks: tuple[str, ...]) -> Recomputed | None:
    memory = plan.memory
    if memory.recomputes_blocks:
        return Recomputed(blocks, memory.kept_ops or ())
    if memory.mode != "parts":
        return None
    parts, modules = memory.recomputed_parts or (), list[torch.nn.Module]()
    for name in blocks:
        block = model.get_submodule(name)
        if "attention" in parts:
            modules += attention_modules(block)
        if "router" in parts:
            routers = (find_router(model, f"{name}.{path}".rpartition(".")[0]) for path, _ in experts_in(block))
            modules += [router[0] for router in routers if router is not None]
    return Recomputed([name for name, module in model.named_modules() if module in modules])


_IDLE = -1  # index of a sample without trained tokens


class StepFlops:
    """Counts the FLOPs of this rank's part of each step: of samples that it lists, and media that it encodes.

    ``left_out``: media or `foundation` -> why its FLOPs cannot be counted.
    """

    def __init__(self, counter: ModelFlops, layout: ModelLayout | None) -> None:
        self._counter, self.left_out = counter, dict[str, str]()
        self._rank = 0 if layout is None else layout.state.rank

    def of(self, batch: StepBatch) -> PackFlops:
        """Return the FLOPs of this rank's part of a step; the parts of all ranks add up to the step."""
        found, topology = PackFlops(), batch.plan.topology
        lists = self._rank in topology.readers and topology.is_owner(self._rank)
        for pack, calls in zip(batch.packs if lists else (), batch.media_calls, strict=False):
            if pack.info.indices != (_IDLE,):
                self._add(found, FOUNDATION, partial(self._counter.of_pack, pack))
                for name, media in (*pack.inputs.items(), *pack.targets.items()):
                    for group in media.groups if name not in calls else ():
                        self._add(found, name, partial(self._counter.of_media, name, group))
        for calls in batch.media_calls:
            for name, groups in calls.items():
                for group in groups if self._encodes(topology, name) else ():
                    self._add(found, name, partial(self._counter.of_media, name, group))
        return found

    def _encodes(self, topology: Topology, name: str) -> bool:
        """Whether this rank's calls for media of this name count; ranks that make a call together count once."""
        component = next(component.name for component in topology.components if name in component.media)
        first = int(topology.call_group_of(component)[self._rank, 0])
        return topology.caller_of(self._rank, component) == self._rank == first

    def _add(self, found: PackFlops, name: str, count: Callable[[], PackFlops]) -> None:
        if name in self.left_out:
            return
        try:
            found.add_all(count())
        except Exception as error:  # a forward that reads a tensor's content; each model fails differently
            self.left_out[name] = f"{type(error).__name__}: {error}"


class RunFlops:
    """Adds up the FLOPs of steps between two lines of metrics; without ``steps``, nothing is counted."""

    def __init__(self, steps: StepFlops | None, peak: Peak | None) -> None:
        self._steps, self.peak = steps, peak
        self._found, self._tokens, self._number = PackFlops(), 0, 0

    def add(self, batch: StepBatch) -> None:
        """Add a step."""
        if self._steps is not None:
            self._found.add_all(self._steps.of(batch))
            self._tokens += int(batch.plan.tokens.sum())
            self._number += 1

    def read(self, peers: Peers, seconds: float) -> dict[str, Any]:
        """Return FLOPs of the last ``seconds`` and their share of the peak, and reset. Every rank calls this."""
        if self._steps is None or self.peak is None or not self._number:
            return {}
        everywhere = peers.gather((self._found, self.peak, self._steps.left_out))
        found = PackFlops()
        for of_rank, _, _ in everywhere:
            found.add_all(of_rank)
        left_out = {name: reason for _, _, reasons in everywhere for name, reason in reasons.items()}
        peaks = [peak for _, peak, _ in everywhere]
        tokens, steps = self._tokens, self._number
        self._found, self._tokens, self._number = PackFlops(), 0, 0
        return flop_metrics(found, steps, tokens, seconds, peaks, left_out)


def flop_metrics(
    found: PackFlops, steps: int, tokens: int, seconds: float, peaks: Sequence[Peak], left_out: Mapping[str, str]
) -> dict[str, Any]:
    """Return the metrics of FLOPs: ``mfu = FLOPs of the model / (seconds * sum of the ranks' peaks)``.

    ``mfu`` counts the pairs that attention's masks keep, ``mfu_full`` all, and ``hfu`` those that are kept, with what
    backwards compute again. ``found`` and ``tokens`` are of all ranks and ``steps``. Without the foundation, there are
    no figures.
    """
    if FOUNDATION in left_out:
        return {"flops": {"left_out": dict(left_out)}}
    passes, possible = found.passes, seconds * sum(peak.flops for peak in peaks)
    of_model, of_hardware = passes.model, passes.hardware
    return {
        "flops": {
            "per_step": of_model.total / steps,
            "per_step_full": of_model.total_full / steps,
            "per_step_hardware": of_hardware.total / steps,
            "per_token": of_model.total / max(1, tokens),
            "components": {name: of.model.total / steps for name, of in sorted(found.components.items())},
            "peak": peaks[0].flops,
            "peak_source": peaks[0].source,
            **({"left_out": dict(left_out)} if left_out else {}),
        },
        "mfu": of_model.total / possible,
        "mfu_full": of_model.total_full / possible,
        "hfu": of_hardware.total / possible,
    }


def run_flops(
    counter: ModelFlops | None, layout: ModelLayout | None, device: torch.device, dtype: torch.dtype
) -> RunFlops:
    """Return what counts a run's FLOPs; ``counter`` has the model before it was laid out; None: nothing counts."""
    if counter is None:
        return RunFlops(None, None)
    if layout is not None:
        follow_plan(counter, {name: component.plan for name, component in layout.components.items()})
    return RunFlops(StepFlops(counter, layout), peak_of(device, dtype))


def counts_flops(setting: bool | Literal["auto"], device: torch.device) -> bool:
    """Whether a run counts FLOPs; `auto`: on CUDA, where peaks are known."""
    return device.type == "cuda" if setting == "auto" else setting
