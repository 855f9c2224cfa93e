"""What the steps of a torch profile cost, in words: attention, matrix products, all-gathers, waiting for data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch.autograd.profiler_util import FunctionEvent

LABEL = "omnitrain: "  # prefix of records that say which part of the model runs
STEP = f"{LABEL}step"
WAIT_FOR_DATA = f"{LABEL}wait for data"
ATTENTION = f"{LABEL}attention"
_BACKWARD = "autograd::engine::evaluate_function"

_PASSES = FORWARD, BACKWARD, AGAIN = "forward", "backward", "again"  # computed again by a backward

# Words for communication -> parts of the names of its records.
_COMMUNICATION = {
    "all-gather": ("all_gather", "allgather", "AllGather"),
    "reduce-scatter": ("reduce_scatter", "ReduceScatter", "post_backward_reduce"),
    "all-to-all": ("all_to_all", "alltoall", "SendRecv"),
    "all-reduce": ("all_reduce", "allreduce", "AllReduce"),
    "other exchanges": ("c10d::", "gloo:", "nccl:", "FSDP::"),
}
IDLE = "the device waits for the host"
PYTHON = "Python between operations"
OPTIMIZER = "optimizer"
LAYERS, EXPERTS, HEAD = "layers", "experts", "loss head"
_AS_THEY_ARE = (OPTIMIZER, HEAD, WAIT_FOR_DATA.removeprefix(LABEL), ATTENTION.removeprefix(LABEL))
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "addmm_", "baddbmm_", "einsum")


@dataclass(frozen=True)
class Costs:
    """Costs of profiled steps of ``seconds``, the largest first: times of the device's kernels, or of the host."""

    rows: Mapping[str, Mapping[str, float]]  # what cost something -> pass -> seconds
    seconds: float
    is_of_device: bool

    def share(self, *names: str) -> float:
        """Return the share of the steps' time that operations take whose name has one of these parts."""
        found = (sum(row.values()) for of, row in self.rows.items() if any(name in of for name in names))
        return sum(found) / self.seconds

    def again(self) -> float:
        """Return the share of forwards that backwards repeat."""
        return sum(row.get(AGAIN, 0.0) for row in self.rows.values()) / self.seconds


def costs_of(events: Iterable[FunctionEvent]) -> Costs:
    """Sum up a profile in words.

    On a GPU the times of its kernels count, and communication may overlap with the others. On a CPU the times of the
    thread that trains count, each operation without those that it calls. ``events``: of a profile in which each step is
    in a record :data:`STEP`, and parts in records with :data:`LABEL`.
    """
    events = sorted(events, key=lambda event: event.time_range.start)  # what calls comes before what it calls
    steps = [event for event in events if event.name == STEP]
    assert steps, "a profile without steps"
    seconds = sum(event.time_range.elapsed_us() for event in steps) / 1e6
    is_of_device = any(event.self_device_time_total for event in events)
    rows: dict[str, dict[str, float]] = {}
    for event, part, phase in _placed(events):
        spent = event.self_device_time_total if is_of_device else event.self_cpu_time_total
        if spent > 0 and (is_of_device or event.thread == steps[0].thread):
            row = rows.setdefault(_in_words(event.name, part), {})
            row[phase] = row.get(phase, 0.0) + spent / 1e6
    if is_of_device:
        rows[IDLE] = {FORWARD: max(0.0, seconds - sum(sum(row.values()) for row in rows.values()))}
    return Costs(dict(sorted(rows.items(), key=lambda row: -sum(row[1].values()))), seconds, is_of_device)


def _placed(events: Iterable[FunctionEvent]) -> Iterator[tuple[FunctionEvent, str, str]]:
    """Yield each record with its part (innermost label, or of the forward that a backward belongs to) and pass."""
    places: dict[int, tuple[str, int | None, bool]] = {}  # record -> its label, its node, whether it is computed again
    parts: dict[int, str] = {}  # number of a record in a forward -> its part
    for event in events:
        part, node, is_again = places.get(id(event.cpu_parent), ("", None, False))
        if event.name.startswith(_BACKWARD):
            part, node, is_again = "", event.sequence_nr, False
        elif event.name.startswith(LABEL) and event.name != STEP:
            part = event.name.removeprefix(LABEL)
        elif event.name.startswith("Optimizer."):
            part = OPTIMIZER
        is_numbered = event.sequence_nr >= 0 and "Backward" not in event.name  # a node's own record has another number
        is_again = is_again or bool(part) or (is_numbered and event.sequence_nr != node)
        places[id(event)] = part, node, is_again
        if node is None:
            if event.sequence_nr >= 0:
                parts[event.sequence_nr] = part
            yield event, part, FORWARD
        else:
            yield event, part or parts.get(node, ""), AGAIN if is_again else BACKWARD


def _in_words(name: str, part: str) -> str:
    for words, signs in _COMMUNICATION.items():
        if any(sign in name for sign in signs):
            return f"{words} of FSDP" if "FSDP" in name else words
    if part in _AS_THEY_ARE or part.startswith(("media of ", "wait for ")):
        return part
    op = name.removeprefix("aten::")
    if "_norm" in op and not part:
        return "gradient norm"
    where = f" of {part}" if part else ""
    if op == "_grouped_mm" or (part == EXPERTS and op in _PRODUCTS):
        return f"products of {EXPERTS}"
    if op in _PRODUCTS:
        return f"matrix products{where}"
    if name.startswith((LABEL, "ProfilerStep", _BACKWARD, "autograd::", "torch::autograd")) or "::" not in name:
        return PYTHON
    return f"norms, activations and copies{where}"


@dataclass(frozen=True)
class Facts:
    """The facts that advice needs besides costs."""

    ranks: int  # number of ranks
    workers: int  # the recipe's `data.workers`
    is_compiled: bool  # whether blocks are compiled
    packs_per_step: int  # packs of a step, over all ranks
    fill: float  # share of the packs' room that has tokens
    settings: Mapping[str, Mapping[str, Any]]  # component -> the fields of its plan that are set
    imbalance: Mapping[str, float]  # encoder -> cost on the busiest rank divided by the mean


def advice(costs: Costs, facts: Facts) -> Iterator[str]:
    """Yield advice, one line each; only where the figures say that it matters."""
    yield from _within_a_rank(costs, facts)
    yield from _between_ranks(costs, facts)
    if (share := costs.share(OPTIMIZER)) >= 0.15:
        yield (
            f"the optimizer takes {share:.0%}: train.packs_per_step={2 * facts.packs_per_step} updates once for twice "
            "as many packs"
        )
    if facts.fill < 0.85:
        yield (
            f"packs are {facts.fill:.0%} full: a larger data.packing_buffer finds samples that fit better, unless an "
            "epoch has few rows for each of the train.packs_per_step packs, since no pack has rows of two epochs"
        )


def _within_a_rank(costs: Costs, facts: Facts) -> Iterator[str]:
    if (share := costs.share("wait for data")) >= 0.05:
        yield (
            f"waiting for data takes {share:.0%}: data.workers={facts.workers + 2} prepares rows in more processes; "
            "data.cached_samples keeps prepared samples that fit into memory"
        )
    # On several ranks of a CPU, their waits for each other look like Python.
    if (share := costs.share(PYTHON, IDLE)) >= 0.25 and (costs.is_of_device or facts.ranks == 1):
        small = "a larger data.pack_tokens has the same operations over more tokens"
        fewer = "" if facts.is_compiled else "; train.compile=true makes fewer of them"
        yield f"{share:.0%} of the time the host prepares operations: {small}{fewer}"
    if costs.is_of_device and not facts.is_compiled and (share := costs.share("norms, activations")) >= 0.2:
        yield f"norms, activations and copies take {share:.0%}: train.compile=true fuses them"
    if (share := costs.again()) >= 0.1:
        yield (
            f"the backward computes {share:.0%} of the time what the forward has computed: if memory is left, try "
            "memory.recompute: selective, or none, in parallel.default"
        )


def _between_ranks(costs: Costs, facts: Facts) -> Iterator[str]:
    if (share := costs.share("of FSDP")) >= 0.1 and facts.ranks > 1:
        yield (
            f"gathering weights and reducing gradients take {share:.0%}: parallel.default.mode=hsdp or replicate "
            "gathers less and needs more memory; a larger data.pack_tokens computes longer for each gather"
        )
    if (share := costs.share("all-to-all")) >= 0.1 and facts.settings.get("foundation", {}).get("ep", 1) != 1:
        yield (
            f"the exchange of the experts' tokens takes {share:.0%}: "
            "parallel.components.foundation.experts.chunks=auto overlaps it with their products"
        )
    for name, imbalance in facts.imbalance.items():
        place = facts.settings.get(name, {}).get("place", "local")
        if imbalance >= 1.1 and place != "world" and costs.share(f"of {name}") >= 0.1:
            yield (
                f"the busiest rank encodes {imbalance:.2f} times the mean with {name}: "
                f"parallel.components.{name}.place=world divides its items among all ranks"
            )


def cost_table(costs: Costs, steps: int, most: int = 10) -> Table:
    """Return the ``most`` expensive operations, and the rest in one row, with their share of the time of ``steps``."""
    of = "kernels on the device; communication may overlap" if costs.is_of_device else "time of the training thread"
    table = Table(title=f"What a step costs ({of})", title_justify="left")
    table.add_column("", overflow="fold")
    for column in ("share", "ms", *_PASSES):
        table.add_column(column, justify="right", no_wrap=True)
    rows = list(costs.rows.items())
    others = {phase: sum(row.get(phase, 0.0) for _, row in rows[most:]) for phase in _PASSES}
    for name, row in [*rows[:most], *([("everything else", others)] if rows[most:] else [])]:
        total, phases = sum(row.values()), (row.get(phase, 0.0) for phase in _PASSES)
        figures = [f"{1e3 * seconds / steps:.1f}" if seconds else "" for seconds in phases]
        table.add_row(name, f"{total / costs.seconds:.1%}", f"{1e3 * total / steps:.1f}", *figures)
    return table
