"""What can be counted of a step without a GPU: operations, kernels, graphs, waits of the host, bytes.

``layer_NAME_operations``: calls of aten in forward and backward of one layer (of three minus of two), in which no other
runs, that are no view and allocate nothing alone; ``compiled``: the same, and kernels that Inductor's CPU backend made.
``waits_KIND``: of the host in a micro-batch, by the tests' model of a device. ``operations_before_exchange``: between
the read of an expert layer's sizes and the start of its first exchange of rows. ``NAME_bytes_N``: of a step's
collectives of one rank of N, of whole tensors. ``saved_bytes_NAME``: that a layer keeps for its backward. Widths of the
last two: Qwen3-30B-A3B, 8,192 tokens, experts over 8 ranks; all else runs on tiny copies.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from gpu.batches import batches_of
from gpu.measured import Load
from gpu.sides import laid_out
from gpu.sizes import config_of, sizes_of
from gpu.tiny_steps import STEPS, packs_of
from harness import ROOT, Result, parser, report, start
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from omnitrain.models.omni.build import build_omni_model
from omnitrain.ops.experts.install import set_experts
from omnitrain.ops.experts.weights import experts_in
from omnitrain.ops.rank_meter import Collective
from omnitrain.parallel.expert.dispatch import GroupLink, RankDispatcher
from omnitrain.parallel.layout import layout_of
from omnitrain.recipe import Ops, Optimizer, ParallelPlan
from omnitrain.recipe.parallel import ComponentPlan
from omnitrain.train.planning.rank_run import RankRun, Training, predict_rank
from omnitrain.train.planning.search import text_pack

FORMULA = "compiled_to_eager = operations and kernels of a compiled layer with recompute / of an eager one"
CPU = torch.device("cpu")
LOAD = Load(CPU, tokens=256, rounds=1, steps=1, seconds=0.0)
MAKING = {"empty", "empty_strided", "empty_like", "new_empty", "resize_", "resolve_conj", "resolve_neg", "result_type"}
TOKENS, EXPERT_RANKS = 8192, 8
WAITING = ("text", "mixed", "experts exchange")
RECOMPUTE = ("none", "selective", "parts", "full")


def is_operation(name: str) -> bool:
    """Whether an event of the profiler is a kernel, or a call of aten that computes."""
    if "_cpp_fused" in name:
        return True
    space, _, op = name.partition("::")
    return space == "aten" and op not in MAKING and not _is_view(op)


@cache
def _is_view(op: str) -> bool:
    """Whether each overload returns views alone; `to`, which calls a copy, counts as one."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{op}")
    aliases = [value.alias_info for schema in schemas for value in schema.returns]
    return op in ("to", "lift_fresh", "_unsafe_view") or all(a is not None and not a.is_write for a in aliases)


def operations_of(kind: str, layers: int, fields: dict[str, Any]) -> tuple[int, int]:
    """Return the operations of a warm micro-batch, and how many graphs were compiled."""
    config = config_of(kind, sizes_of(kind, tiny=True), layers)
    batches = batches_of(kind, sizes_of(kind, tiny=True), config, LOAD)
    with laid_out(config, CPU, ComponentPlan.model_validate(fields), Ops(), "float32") as step:
        packs = packs_of(step, batches)
        for pack in packs[:2]:  # two lengths: sizes are dynamic from the second on
            step.accumulate([pack])
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step.accumulate(packs[:1])
        layout = layout_of(step.model)
        compiled = None if layout is None else layout.components["foundation"].compiled
    leaves = [e for e in profiled.events() if not any(child.name.startswith("aten::") for child in e.cpu_children)]
    return sum(is_operation(event.name) for event in leaves), sum(compiled.compilations.values()) if compiled else 0


def of_layer(kind: str, *, compiles: bool) -> Iterator[tuple[str, float]]:
    """Yield operations of a layer."""
    torch._inductor.config.cpp.enable_kernel_profile = True  # events of its kernels
    plans: dict[str, dict[str, Any]] = {f"eager_{how}": {"memory": {"recompute": how}} for how in ("none", "full")}
    plans |= {"compiled_full": {"memory": {"recompute": "full"}, "compile": True}} if compiles else {}
    found = {}
    for name, fields in plans.items():
        (few, _), (more, graphs) = (operations_of(kind, layers, fields) for layers in (2, 3))
        found[name] = float(more - few)
        yield f"layer_{kind}_{name}_operations", found[name]
        if "compile" in fields:
            yield f"{kind}_graphs", float(graphs)
            yield f"layer_{kind}_compiled_to_eager", found[name] / found["eager_full"]


def waits_of(name: str) -> float:
    """Waits of the host in a micro-batch: of a step of two minus of a step of one."""
    sys.path.append(str(ROOT))  # of the tests' model of a device
    from gpu.waits import counted_on_cpu

    with STEPS[name].on(CPU, "bfloat16") as (step, packs):
        step.run(packs[:1])
        totals = []
        for chosen in (packs[1:2], packs[1:3]):
            with counted_on_cpu(step) as waits:
                step.run(chosen)
            totals.append(waits.total())
    return float(totals[1] - totals[0])


class _Order(TorchDispatchMode):
    """Names of operations, with `read` where the host reads a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" or is_operation(f"aten::{name}"):
            self.names.append(name if func.namespace == "aten" else f"c10d {name}")
        return func(*args, **kwargs or {})


class _Reads(TorchFunctionMode):
    def __init__(self, order: _Order) -> None:
        super().__init__()
        self._order = order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "tolist":
            self._order.names.append("read")
        return func(*args, **kwargs or {})


def over_a_group(chunks: int, model: Any) -> None:
    """Exchange the rows of experts over the process group, which has one rank."""
    for _, experts in experts_in(model):
        set_experts(experts, dispatcher=RankDispatcher(GroupLink(dist.group.WORLD), chunks))


def before_exchange(chunks: int = 1) -> float:
    """Operations between the read of a layer's sizes and its first exchange of rows, the most of all layers."""
    config = config_of("experts", sizes_of("experts", tiny=True), 2)
    batches = batches_of("experts", sizes_of("experts", tiny=True), config, LOAD)
    with laid_out(config, CPU, ComponentPlan(), Ops(), alter=partial(over_a_group, chunks)) as step:
        packs, order = packs_of(step, batches), _Order()
        step.accumulate(packs[:1])
        with order, _Reads(order):
            step.accumulate(packs[1:2])
    found, since = [], None
    for name in order.names:
        if name == "read":
            since = 0
        elif name.startswith("c10d alltoall") and since is not None:
            found.append(since)
            since = None
        elif since is not None:
            since += 1
    return float(max(found))


def of_rank(world: int, layers: int, memory: dict[str, Any], full: bool) -> RankRun:
    """Return what a rank of ``world`` does and holds; ``full``: with the widths of Qwen3-30B-A3B."""
    config = config_of("experts", sizes_of("experts", not full), layers)
    model = build_omni_model(foundation=config, init_device="meta").train()
    training = Training(model, Optimizer(), True, text_pack(model, [TOKENS if full else 64]))
    plan = ComponentPlan.model_validate({"mode": "fsdp2", "ep": min(EXPERT_RANKS, world), "memory": memory})
    return predict_rank(training, ParallelPlan(components={"foundation": plan}), world, 1)


def of_collectives(worlds: list[int], full: bool) -> Iterator[tuple[str, float]]:
    """Yield the bytes that a rank moves in a layer, by kind of collective; experts also as a ratio to even sharding."""
    text = sizes_of("experts", not full).text
    weights = 3 * text["num_experts"] // EXPERT_RANKS * text["hidden_size"] * text["moe_intermediate_size"]
    for world in worlds:
        few, more = (_bytes(of_rank(world, layers, {}, full)) for layers in (1, 2))
        for (kind, ranks), size in sorted((more - few).items()):
            yield f"{kind}_over_{ranks}_bytes_{world}", float(size)
            if kind == "reduce_scatter" and ranks == world // EXPERT_RANKS:
                yield f"experts_to_even_{world}", size / (4 * weights)


def _bytes(run: RankRun) -> Counter[tuple[str, int]]:
    """Kind of collective, and number of its ranks -> bytes in the actions of a step."""
    found: Counter[tuple[str, int]] = Counter()
    for action in run.actions:
        for work, times in action.end.work.items():
            if isinstance(work, Collective) and len(work.ranks) > 1:
                found[work.kind, len(work.ranks)] += times * work.num_bytes
    return found


def saved(recompute: str, full: bool) -> float:
    """Bytes that a layer keeps from its forward to its backward."""
    kept = []
    for layers in (1, 2):
        forward, backward = of_rank(EXPERT_RANKS, layers, {"recompute": recompute}, full).actions
        kept.append(backward.alive - forward.alive)
    return float(kept[1] - kept[0])


def main() -> None:
    """Count, and report."""
    options = parser(__doc__ or "", rounds=1, steps=1)
    options.add_argument("--kinds", nargs="*", default=["text", "experts"], help="models whose layers are counted")
    options.add_argument("--compiled", nargs="*", default=["text"], help="those that are compiled, too: some minutes")
    options.add_argument("--worlds", nargs="*", type=int, default=[64, 512], help="simulated ranks; none: no bytes")
    options.add_argument("--tiny", action="store_true", help="tiny widths everywhere")
    given = start(options)
    figures: dict[str, float] = {}
    for kind in given.kinds:
        figures |= of_layer(kind, compiles=kind in given.compiled)
    for name in WAITING:
        figures[f"waits_{name.replace(' ', '_')}"] = waits_of(name)
    figures["operations_before_exchange"] = before_exchange()
    figures |= of_collectives(given.worlds, not given.tiny)
    if given.worlds:
        figures |= {f"saved_bytes_{how}": saved(how, not given.tiny) for how in RECOMPUTE}
    report(Result("step_counts", FORMULA, figures, {}), given.json)


if __name__ == "__main__":
    main()
