"""Pairs of a forward and a backward on two ranks and a slow network: how much of the all-to-alls they hide.

A whole Qwen3-MoE model of a few layers trains on m micro-batches per rank in fp32, with one thread per rank; its
experts are spread over both ranks (``ep`` 2). ``slow_link.py`` limits the network, so that the all-to-alls of a step
should take 0.5, 1 and 2 times as long as the products of its experts. Without root the benchmark prints a message and
measures nothing.

The sides take turns on the same ranks, with the same weights and packs. Losses and gradients of our sides must have the
same bits:

- ``still``: the plain order without all-to-alls; its results are wrong;
- ``plain``: forward 0, backward 0, forward 1, ...;
- ``chunks``: the same with ``experts.chunks`` and ``experts.delay_wgrad``;
- ``pairs``: each forward runs in turn with the backward of the micro-batch before it (``overlap``);
- ``pairs_chunks``: both;
- ``transformers``: the same model with the ``all_to_all`` expert parallelism of transformers, in the plain order.

All our sides gather the weights once and reduce the gradients once in a step. The bound comes from the simulator
(``plan/schedule/turns.py``): its legs are the seconds between two waits of a ``still`` step of the same round, its
all-to-alls take their bits at the rate of the network. The gather of the weights and the reduction of the gradients
are added to both orders. ``of_bound`` is the part of that bound that pairs reach; ``predicted`` is the simulated time
of a step over the measured one. The two cores also move the bytes, which the simulator does not know: ``still`` with
``pairs`` against ``plain`` shows what the turns alone cost. With ``--slept`` the ranks sleep as long as the products of
their experts take, as a host does while a GPU computes, so that the cores are free for the bytes; all else is the same,
but without ``transformers``.

``peak_to_table`` is the peak memory of a step in pairs over that of the plain order with the activations of one more
micro-batch, as the table says. The activations of a micro-batch are the difference between the peaks of two steps that
keep three and two of them.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from statistics import median
from threading import current_thread, main_thread
from typing import Any
from unittest.mock import patch
from weakref import WeakSet, finalize

import numpy as np
import torch
import torch.distributed as dist
from harness import Result, in_turn, parser, report, settle, start
from moe_overlap import slowest
from slow_link import joined_ranks, limit, may_limit, run_ranks, seconds
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.expert_parallel import apply_expert_parallelism
from turns import Leg, seconds_in_turn, seconds_of_pass

from omnitrain import ComponentPlan, ParallelPlan, build_omni_model, build_parallelize_model, step_planner
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts.entry import settings_of
from omnitrain.ops.experts.weights import experts_in
from omnitrain.parallel.expert.dispatch import GroupLink, Link
from omnitrain.parallel.schedule.executor import Executor
from omnitrain.parallel.state import ParallelState, init_parallel_state
from omnitrain.plan.schedule.actions import Action, Kind, Schedule
from omnitrain.plan.schedule.generators import accumulate
from omnitrain.plan.schedule.lower import lower

FORMULA = (
    "of_bound_Rx_mM = median over rounds of ((plain - pairs) / (simulated plain - simulated pairs)), "
    "of_bound_with_chunks: of pairs_chunks; "
    "hidden_by = (plain - side) / (plain - still)"
)
RANKS, TOP_K, ITEMSIZE, EXPERTS, VOCABULARY = 2, 2, 4, 8, 256
LEGS_OF = 4  # micro-batches
OURS = ("plain", "chunks", "pairs", "pairs_chunks")
SIDES = ("still", "still_pairs", *OURS, "transformers")


class NotedLink(GroupLink):
    """A link that sends nothing, and notes when each all-to-all is waited for."""

    def __init__(self, counting: GroupLink) -> None:
        self._counting = counting
        self.rank, self.size = counting.rank, counting.size
        self.waits: list[float] = []
        self.bytes: list[int] = []

    def start(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Callable[[], Any]:
        """Fill ``out``; the wait notes the time."""
        out.fill_(1e-3)
        to_others = sum(sent) - sent[self.rank]
        from_others = sum(received) - received[self.rank]

        def wait() -> None:
            self.waits.append(time.perf_counter())
            self.bytes.append((to_others + from_others) * rows.size(1) * rows.element_size())  # of both ranks

        return wait

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Exchange the counts, so that the numbers of rows are those of ``plain``."""
        return self._counting.exchange_counts(counts)


def config_of(given: Any) -> Qwen3MoeConfig:
    """Return the config of the model."""
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=given.hidden,
        moe_intermediate_size=given.inner,
        num_hidden_layers=given.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is active, until they die."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: WeakSet[Any] = WeakSet()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note new results of an operation."""
        results = call(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                finalize(storage, self._died, storage.nbytes())
        return results

    def _died(self, num_bytes: int) -> None:
        self.now -= num_bytes


class Products:
    """Stands in for ``grouped_mm``, counts the operations of the products and their seconds, or sleeps as long."""

    def __init__(self) -> None:
        self._real, self._operations, self._seconds = F.grouped_mm, 0, 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Compute the products, and measure them."""
        with patch.object(F, "grouped_mm", self._measure):
            yield
        self._seconds = slowest(self._seconds)

    @contextmanager
    def slept(self) -> Iterator[None]:
        """Sleep instead; all products are zero."""
        with patch.object(F, "grouped_mm", self._sleep):
            yield

    def _measure(self, left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        began = time.perf_counter()
        result = self._real(left, right, offs=offs)
        self._seconds += time.perf_counter() - began
        self._operations += left.numel() * right.size(-1)
        return result

    def _sleep(self, left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        time.sleep(left.numel() * right.size(-1) * self._seconds / self._operations)
        of_each = (len(offs),) if right.dim() == 2 else ()  # the gradients of the experts' weights
        return left.new_zeros(*of_each, left.size(0), right.size(-1))


class Model:
    """The model on this rank, and the work of the sides."""

    def __init__(self, given: Any) -> None:
        self.state: ParallelState = init_parallel_state(ep_size=RANKS)
        self.models = {chunks: self._parallelized(given, chunks) for chunks in (1, given.chunks)}
        self.theirs = self._of_transformers(given)
        self.link = GroupLink(self.state.ep_mesh.get_group())
        rank, tokens = self.state.dp_rank, np.arange(given.tokens)
        generator = np.random.default_rng(rank)
        most = max(*given.micro_batches, LEGS_OF)
        ids = [generator.integers(3, VOCABULARY, given.tokens) for _ in range(most)]
        self.ids = [torch.from_numpy(own)[None] for own in ids]
        self.packs = [
            Pack.from_samples([Sample(f"{rank}.{k}", "text", own, tokens > 0, tokens, index=k)])
            for k, own in enumerate(ids)
        ]
        self.chunks = given.chunks

    def _parallelized(self, given: Any, chunks: int) -> OmniModel:
        torch.manual_seed(0)
        plan = ComponentPlan(experts={"chunks": chunks, "delay_wgrad": chunks > 1})
        return build_parallelize_model(
            build_omni_model(foundation=Qwen3MoeForCausalLM(config_of(given))).train(),
            parallel_state=self.state,
            parallel_plan=ParallelPlan(default=plan),
            enable_mixed_precision=False,
        )

    def _of_transformers(self, given: Any) -> nn.Module:
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config_of(given))
        model.config._experts_implementation = "grouped_mm"
        plan = {}
        for layer in range(given.layers):
            experts = f"model.layers.{layer}.mlp.experts"
            plan |= {f"{experts}.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
            plan[experts] = "ep_dispatch_experts"
        apply_expert_parallelism(model, self.state.ep_mesh, self.state.tp_mesh, plan, "all_to_all")
        return model

    def use(self, link: Link) -> None:
        """Let the experts of our models exchange over ``link``."""
        for model in self.models.values():
            for _, experts in experts_in(model):
                settings_of(experts).dispatcher.link = link

    def step(self, side: str, micro_batches: int) -> list[Tensor]:
        """Run a step; return the loss and the gradients of our sides."""
        if side == "transformers":
            for ids in self.ids[:micro_batches]:
                self.theirs(input_ids=ids, labels=ids).loss.backward()
            self.theirs.zero_grad(set_to_none=True)
            return []
        self.use(NotedLink(self.link) if side.startswith("still") else self.link)
        model = self.models[self.chunks if side.endswith("chunks") else 1]
        return self._run(model, schedule_of(micro_batches, overlap="pairs" in side), micro_batches)

    def _run(self, model: OmniModel, schedule: Schedule, micro_batches: int) -> list[Tensor]:
        batch = step_planner(model)(self.packs[:micro_batches])
        loss = Executor(model, batch, {}).run(schedule)
        gradients = [
            parameter.grad.to_local().clone() for parameter in model.parameters() if parameter.grad is not None
        ]
        model.zero_grad(set_to_none=True)
        return [loss, *gradients]

    def peak(self, schedule: Schedule) -> int:
        """Return the bytes at the peak of a step, without the sharded weights."""
        live, plain_backward = LiveBytes(), Executor._backward

        def backward(executor: Executor, action: Action) -> None:  # a pair's has a thread of its own
            with nullcontext() if current_thread() is main_thread() else live:
                plain_backward(executor, action)

        with live, patch.object(Executor, "_backward", backward), patch.dict(Executor._RUN, {Kind.B: backward}):
            self._run(self.models[1], schedule, schedule.num_micro_batches)
        return live.peak

    def legs(self, number: int = LEGS_OF) -> tuple[list[Leg], list[Leg], float]:
        """Return the legs of a forward and of a backward, and the seconds that a step takes besides.

        The legs have the bytes of their all-to-alls instead of seconds. They are means over all of ``number``
        micro-batches but the last one, after which the gradients are reduced.
        """
        link = NotedLink(self.link)
        self.use(link)
        marks: list[float] = []
        model = self.models[1]
        began = time.perf_counter()
        batch = step_planner(model)(self.packs[:number])
        executor = Executor(model, batch, {}, on_phase=lambda **_: marks.append(time.perf_counter()))
        executor.run(schedule_of(number, overlap=False))
        ended = time.perf_counter()
        model.zero_grad(set_to_none=True)
        waits = np.split(np.array(link.waits), 2 * number)
        legs = [
            np.diff([begin, *inside, end])
            for begin, inside, end in zip(marks[:-2], waits[:-2], marks[1:-1], strict=True)
        ]
        exchanged = link.bytes[: len(waits[0])]
        forward, backward = (legs_of(np.mean(legs[first::2], axis=0), exchanged) for first in (0, 1))
        rest = ended - began - number * sum(leg.compute for leg in (*forward, *backward))
        return forward, backward, max(0.0, rest)


def peak_figures(model: Model) -> dict[str, float]:
    """Peak memory of a step in pairs, and what the table allows: that of the plain order with one more micro-batch."""
    model.use(model.link)
    plain, pairs = (schedule_of(LEGS_OF, overlap=overlap) for overlap in (False, True))
    peaks = {"plain": model.peak(plain), "pairs": model.peak(pairs)}
    two, three = (model.peak(forwards_first(number)) for number in (2, 3))
    more = max(pairs.peak_live()) - max(plain.peak_live())
    figures = {f"{order}_peak_mib": peak / 2**20 for order, peak in peaks.items()}
    figures |= {"activations_mib": (three - two) / 2**20, "more_micro_batches_in_table": float(more)}
    return figures | {"peak_to_table": peaks["pairs"] / (peaks["plain"] + more * (three - two))}


def forwards_first(micro_batches: int) -> Schedule:
    """Return a step that keeps the activations of all micro-batches at a time."""
    one_by_one = accumulate(micro_batches)
    return lower(
        one_by_one.with_actions([sorted(row, key=lambda a: a.kind is not Kind.F) for row in one_by_one.actions])
    )


def schedule_of(micro_batches: int, *, overlap: bool) -> Schedule:
    """Return accumulation on one stage that gathers once and reduces once."""
    return lower(accumulate(micro_batches, overlap=overlap))


def legs_of(seconds_: np.ndarray, exchanges: Sequence[float]) -> list[Leg]:
    """Return legs that take so long; the last one exchanges nothing."""
    return [Leg(float(own), x) for own, x in zip(seconds_, (*exchanges, 0), strict=True)]


def simulated(forward: list[Leg], backward: list[Leg], rest: float, micro_batches: int) -> tuple[float, float, float]:
    """Return the seconds of a step in the plain order, in pairs, and of its all-to-alls.

    Args:
        forward: legs of a forward.
        backward: legs of a backward.
        rest: seconds of a step besides them.
        micro_batches: number of micro-batches.
    """
    alone = seconds_of_pass(forward) + seconds_of_pass(backward)
    exchanges = micro_batches * sum(leg.exchange for leg in (*forward, *backward))
    paired = alone + (micro_batches - 1) * seconds_in_turn(forward, backward)
    return rest + micro_batches * alone, rest + paired, exchanges


def run_rank(given: Any) -> dict[str, Any]:
    """Measure on one rank."""
    settle()
    model = Model(given)
    found = {side: model.step(side, 2) for side in OURS}
    for side in OURS[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found["plain"], found[side], strict=True)), side
    model.step("transformers", 1)
    peaks, products = peak_figures(model), Products()
    with products.measured():
        model.step("plain", LEGS_OF)
    with products.slept() if given.slept else nullcontext():
        return {"rounds": measured_rounds(model, given), "peaks": peaks}


def measured_rounds(model: Model, given: Any) -> dict[str, list[float]]:
    """Return the seconds of each side and of the simulated steps in each round, by name."""
    taken: dict[str, list[float]] = defaultdict(list)
    for ratio, index in product(given.ratios, range(given.rounds)):
        forward, backward, rest = model.legs()
        experts = sum(leg.compute for leg in (*forward[1::2], *backward[1::2]))  # legs alternate: rest, experts
        total = sum(leg.exchange for leg in (*forward, *backward))
        rate = total / (ratio * slowest(experts))  # bytes per second
        if dist.get_rank() == 0 and not given.unlimited:
            limit(8 * rate)
        forward, backward = ([Leg(leg.compute, leg.exchange / rate) for leg in legs] for legs in (forward, backward))
        for m in given.micro_batches:
            name = f"{ratio:g}x_m{m}"
            for what, value in zip(("plain", "pairs", "exchanges"), simulated(forward, backward, rest, m), strict=True):
                taken[f"simulated_{what}_{name}"].append(slowest(value))
            for side in in_turn(sides_of(given), index):
                steps = given.steps * max(given.micro_batches) // m  # as long as those with more micro-batches
                taken[f"{side}_{name}"].append(seconds(lambda side=side, m=m: model.step(side, m), steps))
    return taken


def sides_of(given: Any) -> tuple[str, ...]:
    """Return the sides that take turns."""
    return SIDES[:-1] if given.slept else SIDES


def figures_of(rounds: dict[str, list[float]], name: str, sides: Sequence[str]) -> dict[str, float]:
    """Of one ratio and number of micro-batches."""
    timed = (*sides, "simulated_plain", "simulated_pairs", "simulated_exchanges")
    per_round = [
        dict(zip(timed, values, strict=True))
        for values in zip(*(rounds[f"{what}_{name}"] for what in timed), strict=True)
    ]

    def middle(figure: Callable[[dict[str, float]], float]) -> float:
        return median(map(figure, per_round))

    figures = {
        "of_bound": middle(lambda t: (t["plain"] - t["pairs"]) / (t["simulated_plain"] - t["simulated_pairs"])),
        "of_bound_with_chunks": middle(
            lambda t: (t["plain"] - t["pairs_chunks"]) / (t["simulated_plain"] - t["simulated_pairs"])
        ),
        "bound": middle(lambda t: (t["simulated_plain"] - t["simulated_pairs"]) / t["simulated_exchanges"]),
        "predicted_plain": middle(lambda t: t["simulated_plain"] / t["plain"]),
        "predicted_pairs": middle(lambda t: t["simulated_pairs"] / t["pairs"]),
        "cost_of_turns": middle(lambda t: t["still_pairs"] / t["still"]),
    }
    if "transformers" in sides:
        figures["over_transformers"] = middle(lambda t: t["transformers"] / t["pairs_chunks"])
    for side in OURS[1:]:
        figures[f"hidden_by_{side}"] = middle(lambda t: (t["plain"] - t[side]) / (t["plain"] - t["still"]))  # noqa: B023
    figures |= {f"{side}_seconds": middle(lambda t: t[side]) for side in timed}  # noqa: B023
    return {f"{figure}_{name}": value for figure, value in figures.items()}


def main() -> None:
    """See the top of this file."""
    options = parser(__doc__ or "", rounds=7, steps=1)
    options.add_argument("--tokens", type=int, default=512, help="of a micro-batch of a rank")
    options.add_argument("--hidden", type=int, default=256, help="width of a token")
    options.add_argument("--inner", type=int, default=768, help="width inside an expert")
    options.add_argument("--layers", type=int, default=3)
    options.add_argument("--chunks", type=int, default=4, help="of a rank's experts")
    options.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8], help="of a rank in a step")
    options.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="communication to products")
    options.add_argument("--slept", action="store_true", help="sleep as long as the products of the experts take")
    options.add_argument("--unlimited", action="store_true", help="leave the loopback as fast as it is")
    options.add_argument("--as-rank", action="store_true", help="be one of the ranks")
    given = start(options)
    if given.as_rank:
        with joined_ranks():
            print(json.dumps(run_rank(given)))
        return
    if not given.unlimited and not may_limit():
        print("skipped: cannot limit the loopback; run as root with iproute2 (ip, tc)")
        return
    names = ("tokens", "hidden", "inner", "layers", "chunks", "rounds", "steps")
    arguments = [f"--{name}={getattr(given, name)}" for name in names]
    arguments += ["--ratios", *map(str, given.ratios), "--micro-batches", *map(str, given.micro_batches)]
    arguments += [f"--{name}" for name in ("unlimited", "slept") if getattr(given, name)]
    found = run_ranks(__file__, arguments, ranks=RANKS, is_limited=not given.unlimited)
    rounds, figures = found["rounds"], {}
    for ratio, m in product(given.ratios, given.micro_batches):
        figures |= figures_of(rounds, f"{ratio:g}x_m{m}", sides_of(given))
    figures |= found["peaks"] | {name: float(getattr(given, name)) for name in names[:5]}
    report(Result("overlap_1f1b" + "_slept" * given.slept, FORMULA, figures, rounds), given.json)


if __name__ == "__main__":
    main()
