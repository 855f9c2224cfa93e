"""Experts on two ranks and a slow network: how much of the all-to-alls is hidden by the matmuls.

The experts of one Qwen3-MoE layer are spread over two ranks and run forward and backward in fp32, with one thread per
rank. Routes are random. The benchmark has no router, norms or attention. ``slow_link.py`` limits the network. Its rate
is chosen so that the all-to-alls of a step should take 0.5, 1 and 2 times as long as the products of the experts,
including the activation between them. Each round times the products again, because the speed of a machine varies. It
times them chunk by chunk, as ``overlap`` computes them, because one large result costs the CPU allocator more. The
report gives the measured ratio as ``communication_to_products``. Without root the benchmark prints a message and
measures nothing.

The sides take turns on the same ranks, with the same weights, tokens and routes:

- ``plain``: dispatch, products and combine, one after the other;
- ``overlap``: chunks of experts (``experts.chunks``) and ``experts.delay_wgrad``; outputs and gradients must have the
  same bits;
- ``transformers``: the ``all_to_all`` expert parallelism of transformers; its outputs must be equal to 1e-5;
- ``compute``: ``overlap`` without all-to-alls: the same products and permutations in the same order;
- ``communication``: only the all-to-alls of ``plain``.

The report gives two bounds for the hidden share. ``bound`` holds for ``n`` chunks: nothing can hide the first dispatch
and the last combine of a phase, which are ``1 / n`` of its communication. ``bound_of_phases`` holds for any number of
chunks: a forward has half of the bytes but a third of the products, and can hide at most the smaller of the two.

Memory is the largest sum of the bytes of live tensors in a step, minus the bytes before the step, as torch's profiler
records the allocator. It is measured on a layer with the narrow experts of Qwen3-30B-A3B, twice as wide as the timed
layer. Four such layers in sequence show how much ``memory.offload: [dispatched_rows]`` saves: the peak must fall by
the bytes of the received rows of three layers. The fourth layer has its rows on the device again at that time, for the
gradients of its weights. Offloaded tensors are not in torch's host memory, so a CPU shows the saving of a GPU.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Result, in_turn, parser, peak_of, report, settle, start
from slow_link import joined_ranks, limit, may_limit, run_ranks, seconds
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import Qwen3MoeConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from omnitrain.ops.experts.grouped_mm import ProductMemory, grouped_experts
from omnitrain.ops.experts.install import set_experts
from omnitrain.ops.experts.timing import NOT_RECORDED
from omnitrain.ops.experts.weights import ExpertWeights
from omnitrain.parallel.expert.apply import ExpertLayer, spread_experts
from omnitrain.parallel.expert.dispatch import GroupLink, Link, RankDispatcher
from omnitrain.parallel.memory.offload import ActivationOffload
from omnitrain.parallel.state import init_parallel_state
from omnitrain.recipe.parallel import ComponentPlan

FORMULA = (
    "hidden_Rx = median over rounds of ((compute + communication - overlap) / min(compute, communication)) where "
    "communication = R x products; bits per second = 8 x 4 all-to-alls x rows to other ranks x H x itemsize "
    "/ (R x products' seconds in the round); over_transformers_Rx = median over rounds of (transformers / overlap)"
)
RANKS, TOP_K, ITEMSIZE = 2, 2, 4
LAYERS, INNER = 4, (3, 8)  # of the trials of memory: how many, and their width inside to that of tokens
ALL_TO_ALLS = 4  # rows and results, and the gradients of both
MOST_BITS = 400e6  # per second: up to there the transfer takes few of the processors' cycles
SIDES = ("plain", "overlap", "transformers", "compute", "communication")


@dataclass(frozen=True)
class Sizes:
    """Of the layer: tokens of all ranks, width, width inside an expert, experts of all ranks, chunks of a rank's."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    chunks: int


class StillLink:
    """A link that sends nothing and returns immediately."""

    def __init__(self, counting: GroupLink) -> None:
        self._counting = counting
        self.rank, self.size = counting.rank, counting.size

    def start(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Callable[[], Any]:
        """Return ones, with as many rows as the exchange would give."""
        out.fill_(1.0)
        return lambda: None

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Return ones, so that the numbers of rows are those of ``plain``."""
        return self._counting.exchange_counts(counts)


class HeldLink(GroupLink):
    """Exchanges immediately, and keeps its tensors until the wait, as if the exchange took until then.

    For memory: gloo's threads let go of tensors at times of their own, which the profiler does not see.
    """

    def start(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Callable[[], Any]:
        """See :class:`GroupLink`."""
        super().start(out, rows, received, sent)()
        kept = [out, rows]
        return kept.clear


class Layer:
    """This rank's experts and tokens, and the work of the sides."""

    def __init__(self, sizes: Sizes, link: type[GroupLink] = GroupLink) -> None:
        self.state = init_parallel_state(ep_size=RANKS)
        self.link = link(self.state.ep_mesh.get_group())
        self.sizes = sizes
        self.ours, self.theirs = self._spread_by_omnitrain(), self._spread_by_transformers()
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = sizes.tokens // RANKS
        self.hidden = torch.randn(tokens, sizes.hidden, generator=generator, requires_grad=True)
        self.gradient = torch.randn(tokens, sizes.hidden, generator=generator)
        self.index = torch.rand(tokens, sizes.experts, generator=generator).topk(TOP_K, dim=-1).indices
        self.weights = torch.rand(tokens, TOP_K, generator=generator, requires_grad=True)
        self.plan: Any = RankDispatcher(self.link).plan(self.index, sizes.experts, NOT_RECORDED)
        in_chunks: Any = RankDispatcher(self.link, sizes.chunks).plan(self.index, sizes.experts, NOT_RECORDED)
        self.splits_of_chunks = in_chunks.chunks

    def _fresh(self) -> nn.ModuleDict:
        sizes = self.sizes
        config = Qwen3MoeConfig(num_experts=sizes.experts, hidden_size=sizes.hidden, moe_intermediate_size=sizes.inner)
        experts = Qwen3MoeExperts(config)
        generator = torch.Generator().manual_seed(0)
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=0.02, generator=generator)
        return nn.ModuleDict({"experts": experts})

    def _spread_by_omnitrain(self) -> nn.Module:
        model: Any = self._fresh()
        names = tuple(name for name, _ in model.named_parameters())
        layer = ExpertLayer("experts", names, self.sizes.experts, "auto")
        spread_experts(model, [layer], self.state.ep_mesh, ComponentPlan())
        return model["experts"]

    def _spread_by_transformers(self) -> nn.Module:
        model: Any = self._fresh()
        model["experts"].config._experts_implementation = "grouped_mm"
        plan = {name: "grouped_gemm" for name, _ in model.named_parameters()} | {"experts": "ep_dispatch_experts"}
        apply_expert_parallelism(model, self.state.ep_mesh, self.state.tp_mesh, plan, "all_to_all")
        return model["experts"]

    def step(self, side: str) -> list[Tensor]:
        """Return the output and gradients."""
        if side == "communication":
            return self._communicate()
        experts = self.theirs if side == "transformers" else self.ours
        if experts is self.ours:
            self.set(StillLink(self.link) if side == "compute" else self.link, overlaps=side != "plain")
        output = experts(self.hidden, self.index, self.weights)
        output.backward(self.gradient)
        return [output.detach(), *self._taken_gradients(experts)]

    def step_of_several(self, layers: int) -> None:
        """Run forward and backward of the layer with its settings, applied ``layers`` times."""
        hidden: Tensor = self.hidden
        for _ in range(layers):
            hidden = self.ours(hidden, self.index, self.weights)
        hidden.backward(self.gradient)
        self._taken_gradients(self.ours)

    def _taken_gradients(self, experts: nn.Module) -> list[Tensor]:
        learned = [self.hidden, self.weights, *experts.parameters()]
        gradients = [tensor.grad for tensor in learned]
        for tensor in learned:
            tensor.grad = None
        return [gradient for gradient in gradients if gradient is not None]

    def forward(self) -> None:
        """Of ``compute``."""
        self.set(StillLink(self.link), overlaps=True)
        self.ours(self.hidden, self.index, self.weights)

    def set(self, link: Link, *, overlaps: bool) -> None:
        """Let our experts exchange over ``link``, in chunks or not."""
        chunks = self.sizes.chunks if overlaps else 1
        set_experts(self.ours, dispatcher=RankDispatcher(link, chunks), delays_weight_gradients=overlaps)

    def _communicate(self) -> list[Tensor]:
        (splits,) = self.plan.chunks
        here, there = (torch.ones(sum(rows), self.sizes.hidden) for rows in (splits.sent, splits.received))
        for _ in range(ALL_TO_ALLS // 2):
            self.link.start(there, here, splits.received, splits.sent)()
            self.link.start(here, there, splits.sent, splits.received)()
        return []

    def multiply(self) -> None:
        """Run only the experts' matmuls and activations, in chunks of experts, forward and backward."""
        every = self.splits_of_chunks
        chunks = ExpertWeights.of(self.ours).in_chunks([splits.ranges for splits in every], None)
        rows = [torch.ones(sum(splits.received), self.sizes.hidden, requires_grad=True) for splits in every]
        memory = ProductMemory()
        results = [
            grouped_experts(own, of, splits.ends, memory) for own, of, splits in zip(chunks, rows, every, strict=True)
        ]
        torch.autograd.grad(results, [*rows, *self.ours.parameters()], [torch.ones_like(own) for own in results])

    @property
    def bits(self) -> float:
        """Return the bytes that all ranks send in a step, by the formula."""
        (splits,) = self.plan.chunks
        rows = torch.tensor([sum(splits.sent) - splits.sent[self.link.rank]])
        dist.all_reduce(rows)
        return 8.0 * ALL_TO_ALLS * float(rows) * self.sizes.hidden * ITEMSIZE


def slowest(own: float) -> float:
    """Return the maximum over all ranks."""
    most = torch.tensor([own], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def check_equal(layer: Layer) -> None:
    """Check that the sides compute the same."""
    plain, overlap, theirs = (layer.step(side) for side in ("plain", "overlap", "transformers"))
    for one, other in zip(plain, overlap, strict=True):
        assert torch.equal(_local(one), _local(other))
    for one, other in zip(plain, theirs, strict=True):
        one, other = _local(one), _local(other)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(one.abs().max()))


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def peak_bytes(layer: Layer, side: str) -> int:
    """Return the peak memory of a step above the memory before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, record_function("step"):
        layer.step(side)
    return peak_of(profiled, "step")


class HostMemory(ActivationOffload):
    """Of a CPU: copies in memory that torch's profiler does not see, and back into such as it sees."""

    def out(self, tensor: Tensor) -> Tensor:
        """See :class:`ActivationOffload`."""
        self.num_bytes += tensor.nbytes
        return torch.from_numpy(tensor.detach().numpy().copy())

    def back(self, host: Tensor) -> tuple[Tensor, None]:
        """See :class:`ActivationOffload`."""
        return host.clone(), None


def offload_savings(layer: Layer) -> dict[str, float]:
    """MiB by which the peak of several layers falls where the rows that came wait in host memory, and should fall."""
    peaks = []
    offload = HostMemory(torch.device("cpu"))
    for saving in (None, offload.saving_only):
        layer.set(layer.link, overlaps=True)
        set_experts(layer.ours, saving=saving)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, record_function("step"):
            layer.step_of_several(LAYERS)
        peaks.append(peak_of(profiled, "step"))
    set_experts(layer.ours, saving=None)
    expected = offload.num_bytes * (LAYERS - 1) / LAYERS
    saved = peaks[0] - peaks[1]
    return {
        "offload_saved_to_predicted": saved / expected,
        "offload_predicted_mib": expected / 2**20,
        "overlap_peak_mib_of_layers": peaks[0] / 2**20,
    }


def run_rank(sizes: Sizes, ratios: Sequence[float], rounds: int, steps: int, is_limited: bool) -> dict[str, Any]:
    """Measure on one rank."""
    settle()
    thin = Layer(replace(sizes, hidden=2 * sizes.hidden, inner=2 * sizes.hidden * INNER[0] // INNER[1]), HeldLink)
    peaks = {side: peak_bytes(thin, side) for side in ("plain", "overlap", "transformers")}
    offload = offload_savings(thin)
    del thin
    layer = Layer(sizes)
    check_equal(layer)
    layer.multiply()
    share_of_forward = seconds(layer.forward, 1) / seconds(lambda: layer.step("compute"), 1)
    bits = layer.bits
    taken: dict[str, list[float]] = defaultdict(list)
    for ratio, index in product(ratios, range(rounds)):
        products = slowest(seconds(layer.multiply, steps))
        taken[f"products_{ratio:g}x"].append(products)
        if is_limited:
            set_rate(bits / (ratio * products))
        for side in in_turn(SIDES, index):
            taken[f"{side}_{ratio:g}x"].append(seconds(lambda side=side: layer.step(side), steps))
    return {"rounds": taken, "peaks": peaks, "offload": offload, "bits": bits, "share_of_forward": share_of_forward}


def set_rate(bits_per_second: float) -> None:
    """Of the loopback, from the next barrier on."""
    if bits_per_second > MOST_BITS:
        raise SystemExit(f"{bits_per_second / 1e6:.0f} Mbit/s are more than {MOST_BITS / 1e6:.0f}: enlarge --inner")
    if dist.get_rank() == 0:
        limit(bits_per_second)


def figures_of(found: dict[str, Any], ratio: float, chunks: int) -> dict[str, float]:
    """Of one ratio of communication to products."""
    name = f"{ratio:g}x"
    timed = (*SIDES, "products")
    per_round = [
        dict(zip(timed, values, strict=True))
        for values in zip(*(found["rounds"][f"{what}_{name}"] for what in timed), strict=True)
    ]
    one = {what: median(taken[what] for taken in per_round) for what in timed}
    ratios = [taken["communication"] / taken["products"] for taken in per_round]
    compute, communication, forward = one["compute"], one["communication"], found["share_of_forward"]
    phases = ((forward * compute, communication / 2), ((1 - forward) * compute, communication / 2))
    both = sum(min(phase) for phase in phases) / min(compute, communication)

    def hidden(taken: dict[str, float]) -> float:
        together = taken["compute"] + taken["communication"]
        return (together - taken["overlap"]) / min(taken["compute"], taken["communication"])

    figures = {
        "hidden": median(map(hidden, per_round)),
        "bound": 1 - 1 / chunks,
        "bound_of_phases": both,
        "over_transformers": median(taken["transformers"] / taken["overlap"] for taken in per_round),
        "over_plain": median(taken["plain"] / taken["overlap"] for taken in per_round),
        "communication_to_products": median(ratios),
        "least_communication_to_products": min(ratios),
        "most_communication_to_products": max(ratios),
        "communication_to_compute": median(taken["communication"] / taken["compute"] for taken in per_round),
        "megabits_per_second": found["bits"] / 1e6 / (ratio * one["products"]),
    }
    figures |= {f"{what}_seconds": value for what, value in one.items()}
    return {f"{figure}_{name}": value for figure, value in figures.items()}


def main() -> None:
    """See the top of this file."""
    options = parser(__doc__ or "", rounds=7, steps=1)
    options.add_argument("--tokens", type=int, default=8192, help="of all ranks")
    options.add_argument("--hidden", type=int, default=256, help="width of a token")
    options.add_argument("--inner", type=int, default=4096, help="width inside an expert")
    options.add_argument("--experts", type=int, default=32, help="of all ranks")
    options.add_argument("--chunks", type=int, default=16, help="of a rank's experts")
    options.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="communication to products")
    options.add_argument("--unlimited", action="store_true", help="leave the loopback as fast as it is")
    options.add_argument("--as-rank", action="store_true", help="be one of the ranks")
    given = start(options)
    sizes = Sizes(given.tokens, given.hidden, given.inner, given.experts, given.chunks)
    if given.as_rank:
        with joined_ranks():
            print(json.dumps(run_rank(sizes, given.ratios, given.rounds, given.steps, not given.unlimited)))
        return
    if not given.unlimited and not may_limit():
        print("skipped: cannot limit the loopback; run as root with iproute2 (ip, tc)")
        return
    arguments = [f"--{name}={getattr(given, name)}" for name in (*vars(sizes), "rounds", "steps")]
    arguments += ["--ratios", *map(str, given.ratios), *(["--unlimited"] if given.unlimited else [])]
    found = run_ranks(__file__, arguments, ranks=RANKS, is_limited=not given.unlimited)
    peaks = found["peaks"]
    figures = {}
    for ratio in given.ratios:
        figures |= figures_of(found, ratio, given.chunks)
    figures |= {"peak_ratio": peaks["overlap"] / peaks["plain"]}
    figures |= {f"{side}_peak_mib": peak / 2**20 for side, peak in peaks.items()}
    figures |= found["offload"]
    figures |= {name: float(size) for name, size in vars(sizes).items()}
    report(Result("moe_overlap", FORMULA, figures, found["rounds"]), given.json)


if __name__ == "__main__":
    main()
