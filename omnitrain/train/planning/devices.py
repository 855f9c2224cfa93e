"""What devices and links do: peak rates from data sheets, and the share of them that training code reaches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from omnitrain.errors import UserError
from omnitrain.ops.rank_meter import Collective, Op
from omnitrain.parallel.environment import available_memory
from omnitrain.recipe.suggest import hint
from omnitrain.train.launch.launch import num_cores
from omnitrain.train.metrics.flops import peak_of

_GB = 10**9
_TRIALS = 5
_COPIED = 2**23  # numbers; more than caches hold
# Bytes that each rank sends for a collective over n ranks, as a share of the tensor: rings, as NCCL counts them.
_SENT = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "broadcast": 1, "send": 1}


@dataclass(frozen=True)
class Device:
    """A device and its links.

    Attributes:
        name: as the command takes it.
        flops: products in bf16 per second, dense, at best.
        memory: bytes that a process can use.
        bandwidth: bytes per second of its memory.
        link: bytes per second that it sends to devices of its node; ``network``: to those of other nodes.
        per_node: devices of a node.
        source: where these figures are from.
        efficiency: share of ``flops`` that a wide product reaches; ``half_width``: the shortest side of a product that
            reaches half of that.
        memory_efficiency: share of ``bandwidth``, and of the links, that is reached.
        launch: seconds that an operation takes at least; ``latency``: a collective.
        has_gloo: ranks exchange over gloo: they wait for what FSDP gathers and reduces, and a reduce-scatter reduces
            the whole tensor on all ranks (``ProcessGroupGloo`` of torch).
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    per_node: int
    source: str
    efficiency: float = 0.75
    half_width: int = 128
    memory_efficiency: float = 0.8
    launch: float = 4e-6
    latency: float = 15e-6
    has_gloo: bool = False

    def seconds_of(self, op: Op) -> float:
        """Return the seconds of an operation: of its products or of its bytes, whichever take longer."""
        reached = self.flops * self.efficiency * op.width / (op.width + self.half_width) if op.flops else 1.0
        moved = op.num_bytes / (self.bandwidth * self.memory_efficiency)
        return max(op.flops / reached, moved, self.launch)

    def seconds_of_link(self, collective: Collective) -> float:
        """Return the seconds of a collective; one that leaves a node goes at the rate of the network."""
        ranks = collective.ranks
        size = len(ranks)
        if size == 1:
            return 0.0
        is_inside = ranks[0] // self.per_node == ranks[-1] // self.per_node
        rate = (self.link if is_inside else self.network) * self.memory_efficiency
        share = 1.0 if collective.kind in ("broadcast", "send") else (size - 1) / size
        kind = "all_reduce" if self.has_gloo and collective.kind == "reduce_scatter" else collective.kind
        return self.latency + _SENT[kind] * share * collective.num_bytes / rate

    def seconds(self, work: Mapping[Op | Collective, int]) -> Seconds:
        """Return the seconds of counted work."""
        found = {"computed": 0.0, "waited": 0.0, "beside": 0.0}
        for one, times in work.items():
            if isinstance(one, Op):
                found["computed"] += self.seconds_of(one) * times
            else:
                found["waited" if one.is_waited_for else "beside"] += self.seconds_of_link(one) * times
        return Seconds(**found)

    def shared_by(self, num_ranks: int) -> Device:
        """Return what each of ``num_ranks`` ranks has: a GPU of its own, or its share of the one CPU of this machine.

        Ranks divide its memory, and its cores where they have more threads than these.
        """
        if self.name != MEASURED:
            return self
        share = min(1.0, num_cores() / torch.get_num_threads() / num_ranks)
        rates = {rate: getattr(self, rate) * share for rate in ("flops", "bandwidth", "link", "network")}
        return replace(self, memory=self.memory / num_ranks, **rates)


@dataclass(frozen=True)
class Seconds:
    """Seconds of an action: that it computes, that it waits for collectives, and of collectives beside both."""

    computed: float = 0.0
    waited: float = 0.0
    beside: float = 0.0

    @property
    def total(self) -> float:
        """From its start to its end."""
        return max(self.computed + self.waited, self.beside)


_NVIDIA = "NVIDIA's data sheet of it (SXM); usable memory as nvidia-smi shows it"
DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312e12, 79.1 * 2**30, 2039 * _GB, 300 * _GB, 25 * _GB, 8, _NVIDIA),
        Device("h100", 989e12, 79.1 * 2**30, 3350 * _GB, 450 * _GB, 50 * _GB, 8, _NVIDIA),
        Device("h200", 989e12, 140.4 * 2**30, 4800 * _GB, 450 * _GB, 50 * _GB, 8, _NVIDIA),
        Device("b200", 2250e12, 178.3 * 2**30, 8000 * _GB, 900 * _GB, 50 * _GB, 8, _NVIDIA),
    )
}
MEASURED = "measured"


def find_device(name: str, *, per_node: int | None = None, memory: float | None = None) -> Device:
    """Return a device by its name; ``measured``: this machine's CPU, measured in a second.

    ``per_node``, ``memory``: in place of its own; memory in bytes.
    """
    if name != MEASURED and name not in DEVICES:
        raise UserError(f"--device {name}: unknown; {hint(name, [*DEVICES, MEASURED])}")
    device = _this_cpu() if name == MEASURED else DEVICES[name]
    if per_node is not None:
        device = replace(device, per_node=per_node)
    return device if memory is None else replace(device, memory=memory)


def device_here(kind: str) -> Device:
    """Return the device on which this machine trains; ``kind``: ``cpu`` or ``cuda``.

    Raises UserError: its GPUs are none of those that are known.
    """
    if kind == "cpu":
        return find_device(MEASURED)
    gpu = torch.cuda.get_device_properties(0)
    known = next((device for name, device in DEVICES.items() if name.upper() in gpu.name), None)
    if known is None:
        names = ", ".join(map(str.upper, DEVICES))
        raise UserError(f"parallel.auto: found the GPU {gpu.name}; expected one of {names}; write degrees in its place")
    return replace(known, memory=float(gpu.total_memory), per_node=torch.cuda.device_count())


def _this_cpu() -> Device:
    """The CPU of this machine with as many threads as torch has, whose ranks exchange through its memory."""
    peak, copied = peak_of(torch.device("cpu"), torch.float32), max(_copied() for _ in range(_TRIALS))
    return Device(
        MEASURED, peak.flops, float(available_memory() or 0), copied, copied / 4, copied / 4, 2**20,
        "measured now on this machine", efficiency=1.0, half_width=8, memory_efficiency=1.0,
        has_gloo=True,
    )  # fmt: skip


def _copied() -> float:
    """Bytes per second that a copy reads and writes."""
    left, right = torch.ones(_COPIED), torch.ones(_COPIED)
    start = time.perf_counter()
    left.copy_(right)
    return 2 * left.nbytes / (time.perf_counter() - start)
