"""Pipelines: the executor against the closed forms of its schedules, and against the simulator.

``sleep``: every block sleeps in its forward and its backward, so that the ranks need almost no processor, and 4 or 8 of
them run on two cores. The step's time is compared with the closed form of the schedule (``zbv``: with the simulator).
``compute``: two ranks with one core each run a real model. The simulator gets the seconds of each stage's forward and
backward, measured in the same steps, and its makespan is compared with the step's time; the sides take turns.
``weights``: one process computes a backward as a whole, and in two parts: gradients of inputs, then those of weights;
of a dense model, and of one with experts. Seconds are those of the processor. The process keeps freed memory, as
torch's allocator on a device does: the gradients that wait for the second part need more of it.

The bubble is the part of a step in which a rank does not compute, on average over the ranks. The closed form of it has
stages of equal cost, and no time for anything else.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from functools import partial
from statistics import median
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from harness import Result, in_turn, parser, report, settle, start
from torch import Tensor
from transformers import AutoConfig

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.models.discovery.text_run import text_blocks
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.delayed_wgrad import WeightGradients, delayed_to, delaying
from omnitrain.ops.experts.install import use_omnitrain_experts
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.executor import Executor
from omnitrain.parallel.schedule.table import schedule_of
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_parallel_state
from omnitrain.parallel.step.plan import step_planner
from omnitrain.plan.schedule.actions import Action, Kind
from omnitrain.plan.schedule.generators import generate
from omnitrain.plan.schedule.lower import lower
from omnitrain.plan.schedule.simulate import simulate
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
from omnitrain.recipe.plan_groups import PipelineSchedule

FORMULA = (
    "sleep: measured seconds of a step / closed form: 1f1b m (F + B) + (p - 1) (F + B); interleaved m (F + B) + "
    "(p - 1) (F + B) / v; zbv: makespan of the simulator; compute: measured seconds of a step / makespan of the "
    "simulator; weights: seconds of both parts of a backward / seconds of the backward; bubble: 1 - seconds that a "
    "rank computes / seconds of the step"
)
SECONDS = 0.12  # of a stage's forward, and of each half of its backward
KINDS = {"1f1b": 1, "interleaved": 2, "zbv": 2}  # kind -> stages per rank


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


def sleeping(block: torch.nn.Module, _arguments: Any, output: Tensor) -> Tensor:
    """Sleep as long as a forward takes; the backward sleeps twice as long, or leaves half of it to the weights."""
    time.sleep(SECONDS)
    delayed, weight = delayed_to(), next(block.parameters())
    if delayed is None:
        return _SleepInBackward.apply(output, 2 * SECONDS)

    def make() -> Tensor:
        time.sleep(SECONDS)
        return torch.zeros_like(weight)

    delayed.add(weight, make)
    return _SleepInBackward.apply(output, SECONDS)


def model_of(blocks: int, width: int, experts: int = 0) -> OmniModel:
    """A Qwen3 of equal blocks; with experts, each token goes to two of them."""
    torch.manual_seed(0)
    of_experts = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": width} if experts else {}
    config = AutoConfig.for_model(
        "qwen3_moe" if experts else "qwen3",
        vocab_size=64,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=width // 4,
        **of_experts,
    )
    foundation = foundation_class(config)(config)
    use_omnitrain_experts(foundation)
    return build_omni_model(foundation=foundation).train()


def pipeline_of(kind: str, ranks: int, blocks: int, width: int) -> OmniModel:
    """A Qwen3 of equal blocks on stages."""
    model = model_of(blocks, width)
    schedule = PipelineSchedule(kind=kind, split=[blocks // (ranks * KINDS[kind])] * (ranks * KINDS[kind]))
    if kind == "interleaved":
        schedule = schedule.model_copy(update={"chunks": KINDS[kind]})
    plan = ParallelPlan(components={"foundation": ComponentPlan(schedule=schedule)})
    state = init_parallel_state(pp_size=ranks)
    return build_parallelize_model(model, parallel_state=state, parallel_plan=plan, enable_mixed_precision=False)


def packs_of(number: int, tokens: int) -> list[Pack]:
    """Packs of text of one length."""
    generator = torch.Generator().manual_seed(0)
    packs = []
    for index in range(number):
        ids = torch.randint(3, 64, (tokens,), generator=generator).numpy()
        mask = torch.ones(tokens, dtype=torch.bool).numpy()
        mask[0] = False
        sample = Sample(f"{index}", "text", ids, mask, torch.arange(tokens).numpy(), index=index)
        packs.append(Pack.from_samples([sample]))
    return packs


def timed(run: Any, executor: Timed, action: Action) -> None:
    """Run one action, and note how long it computes."""
    began, executor.waited = time.perf_counter(), 0.0
    run(executor, action)
    assert action.stage is not None
    executor.taken[action.kind.value, action.stage].append(time.perf_counter() - began - executor.waited)


class Timed(Executor):
    """Measures how long each action computes, without the time for which it waits for another stage."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.taken: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.waited = 0.0

    def _arrived(self, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        began = time.perf_counter()
        tensors = super()._arrived(*arguments, **options)
        self.waited += time.perf_counter() - began
        return tensors

    _RUN: ClassVar = {
        kind: partial(timed, run) if kind in (Kind.F, Kind.B, Kind.I, Kind.W) else run
        for kind, run in Executor._RUN.items()
    }


def one_step(model: OmniModel, batch: Any) -> tuple[float, dict[tuple[str, int], float]]:
    """Return the seconds of a step, the same on all ranks, and those of each kind of action of this rank's stages."""
    executor = Timed(model, batch, {})
    schedule = schedule_of(model, batch.plan)
    dist.barrier()
    began = time.perf_counter()
    executor.run(schedule)
    taken = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    model.zero_grad(set_to_none=True)
    return taken.item(), {key: sum(values) / len(values) for key, values in executor.taken.items()}


def sleep_on_rank(ranks: int, number: int, rounds: int) -> dict[str, list[float]]:
    """Measure the schedules in turn on one rank; return kind -> seconds of each round."""
    settle()
    models = {}
    for kind, chunks in KINDS.items():
        models[kind] = pipeline_of(kind, ranks, ranks * chunks, 16)
        for block in text_blocks(models[kind].foundation):
            block.register_forward_hook(sleeping)
    batches = {kind: step_planner(model)(packs_of(number, 8)) for kind, model in models.items()}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for index in range(-1, rounds):  # one round to warm up
        for kind in in_turn(tuple(KINDS), index):
            seconds, _ = one_step(models[kind], batches[kind])
            if index >= 0:
                found[kind].append(seconds)
    return found


def closed_form(kind: str, ranks: int, number: int) -> float:
    """Seconds of a step of sleeping stages."""
    chunk = 3 * SECONDS
    if kind == "1f1b":
        return (number + ranks - 1) * chunk
    if kind == "interleaved":
        return number * KINDS[kind] * chunk + (ranks - 1) * chunk
    schedule = lower(generate(kind, ranks, number))
    return float(simulate(schedule, {Kind.F: SECONDS, Kind.I: SECONDS, Kind.W: SECONDS, Kind.B: 2 * SECONDS}).makespan)


def closed_form_bubble(kind: str, ranks: int, number: int) -> float:
    """The part of a step of equal stages in which a rank does not compute."""
    return 1 - seconds_of_sleep(kind, number) / closed_form(kind, ranks, number)


def seconds_of_sleep(kind: str, number: int) -> float:
    """Seconds for which each rank sleeps in a step."""
    return 3 * SECONDS * KINDS[kind] * number


def compute_on_rank(number: int, rounds: int, width: int, tokens: int) -> dict[str, list[dict[str, float]]]:
    """Return kind -> for each round, the measured and simulated seconds of a step, and the bubble."""
    settle()
    models = {kind: pipeline_of(kind, 2, 8, width) for kind in KINDS}
    batches = {kind: step_planner(model)(packs_of(number, tokens)) for kind, model in models.items()}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for index in range(-1, rounds):
        for kind in in_turn(tuple(KINDS), index):
            seconds, durations = one_step(models[kind], batches[kind])
            everyone: list[Any] = [None, None]
            dist.all_gather_object(everyone, durations)
            of_stage = {(Kind(k), s): value for one in everyone for (k, s), value in one.items()}
            schedule = schedule_of(models[kind], batches[kind].plan)
            simulated = float(simulate(schedule, of_stage).makespan)
            bubble = 1 - number * sum(of_stage.values()) / (len(everyone) * seconds)
            if index >= 0:
                found[kind].append({"measured": seconds, "simulated": simulated, "bubble": bubble})
    return found


def backward_in(parts: int, model: OmniModel, pack: Pack) -> list[float]:
    """Return the processor's seconds of a backward, or of its two parts."""
    model.zero_grad(set_to_none=True)
    work = WeightGradients() if parts == 2 else None
    with delaying(work):
        loss = model(pack).losses["text"].sum
    began = time.thread_time()
    loss.backward()
    ended = [time.thread_time()]
    if work is not None:
        work.accumulate()
        ended.append(time.thread_time())
    return [end - start for start, end in zip((began, *ended), ended, strict=False)]


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for this process, where it is glibc."""
    trim_threshold, mmap_threshold = -1, -3
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 2 << 30)


def split_backward(rounds: int, width: int, tokens: int) -> dict[str, dict[str, list[float]]]:
    """Return model -> seconds of a backward (``B``), and of its gradients of inputs (``I``) and of weights (``W``)."""
    keep_freed_memory()
    (pack,) = packs_of(1, tokens)
    found = {}
    for name, experts in (("dense", 0), ("experts", 8)):
        model = model_of(4, width, experts)
        found[name] = {kind: [] for kind in "BIW"}
        for index in range(-2, rounds):
            for kinds in in_turn(("B", "IW"), index):
                taken = backward_in(len(kinds), model, pack)
                if index >= 0:
                    for kind, seconds in zip(kinds, taken, strict=True):
                        found[name][kind].append(seconds)
    return found


def main() -> None:
    """See the top of this file."""
    options = parser(__doc__ or "", rounds=7, steps=1)
    options.add_argument("--ranks", type=int, nargs="*", default=[4, 8], help="sleeping ranks")
    options.add_argument("--width", type=int, default=256, help="of the model that computes")
    options.add_argument("--tokens", type=int, default=256, help="of its packs")
    given = start(options)
    figures: dict[str, float] = {}
    rounds: dict[str, list[float]] = {}
    for ranks in given.ranks:
        number = 2 * ranks
        with RankPool(ranks, preload=("pipeline",)) as pool:
            found = pool.run("pipeline:sleep_on_rank", ranks, number, given.rounds, timeout_s=900)[0]
        for kind, seconds in found.items():
            figures[f"sleep_{ranks}_ranks_{kind}"] = median(seconds) / closed_form(kind, ranks, number)
            bubble = 1 - seconds_of_sleep(kind, number) / median(seconds)
            figures[f"sleep_{ranks}_ranks_{kind}_bubble"] = bubble
            figures[f"sleep_{ranks}_ranks_{kind}_closed_form_bubble"] = closed_form_bubble(kind, ranks, number)
            rounds[f"sleep_{ranks}_ranks_{kind}_seconds"] = seconds
    with RankPool(2, preload=("pipeline",)) as pool:
        number = 8
        sizes = (number, given.rounds, given.width, given.tokens)
        of_compute = pool.run("pipeline:compute_on_rank", *sizes, timeout_s=600)[0]
    for kind, steps in of_compute.items():
        figures[f"compute_{kind}"] = median(step["measured"] / step["simulated"] for step in steps)
        figures[f"compute_{kind}_bubble"] = median(step["bubble"] for step in steps)
        figures[f"compute_{kind}_closed_form_bubble"] = closed_form_bubble(kind, 2, number)
        for name in ("measured", "simulated", "bubble"):
            rounds[f"compute_{kind}_{name}"] = [step[name] for step in steps]
    for name, seconds in split_backward(given.rounds, given.width, 2 * given.tokens).items():
        rounds |= {f"weights_{name}_{kind}_seconds": values for kind, values in seconds.items()}
        steps = list(zip(*seconds.values(), strict=True))
        figures[f"weights_{name}_both_parts"] = median((inputs + weights) / whole for whole, inputs, weights in steps)
        figures[f"weights_{name}_second_part"] = median(weights / whole for whole, _, weights in steps)
    report(Result("pipeline", FORMULA, figures, rounds), given.json)


if __name__ == "__main__":
    main()
