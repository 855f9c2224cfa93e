"""An encoder with a rank of its own, beside the same foundation on text alone, over a slow link.

Rank 0 trains the foundation of a Qwen3-VL, rank 1 its tower, each on one core. A step has 32 micro-batches, of which
every second one is drawn with media; the planner orders them. On text alone, these packs have as many tokens and as
many trained ones, and rank 1 has nothing to do. ``queue``: messages are posted ahead, and travel while both ranks
compute. ``blocking``: a send waits until it is received, a receive is posted when it is needed, and the section keeps
one micro-batch at a time.

``sleep``: blocks sleep in place of computing, so that little is left but messages, and what the foundation does with
the features: it writes them into its embeddings. ``compute``: the real model. ``of_text`` is the tokens per second
with media over those on text alone; ``bound`` is what the simulator finds for it if messages take no time, with the
measured seconds of each action, and ``of_bound`` what the messages leave of that. ``simulated`` is the measured time
of a step over the makespan of the simulator, which gets the rate of the link, too. Sides take turns.

``balance`` is simulated alone: 32 micro-batches on 8 ranks that all have the encoder, and on 8 ranks beside one or two
that have nothing but it. ``of_text`` is again tokens per second over those of text alone, ``per_rank`` the same for
each rank that a layout needs. A micro-batch with media has 8 items.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from encoders import model_of, pack_of
from harness import Result, in_turn, parser, report, start
from slow_link import joined_ranks, limit, may_limit, run_ranks
from torch import Tensor, nn

from omnitrain.models.discovery.text_run import text_blocks
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.timing import SpanRecorder
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.executor import Executor
from omnitrain.parallel.schedule.table import schedule_of
from omnitrain.parallel.sections.carriers.torch_p2p import torch_carrier
from omnitrain.parallel.sections.edges import messages_of
from omnitrain.parallel.sections.message import Arrival, Carrier, Departure, Message, Part
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.step.plan import step_planner
from omnitrain.plan.balance import assign_by_cost
from omnitrain.plan.schedule.actions import Action, Kind, Schedule, SectionWindows
from omnitrain.plan.schedule.draw import gantt
from omnitrain.plan.schedule.generators import accumulate
from omnitrain.plan.schedule.sections import with_sections
from omnitrain.plan.schedule.simulate import Event, MessageCost, Timeline, simulate
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan, Section

FORMULA = (
    "of_text = seconds of a step on text alone / seconds with media, at equal tokens; bound: with the seconds of the "
    "simulator if messages take no time; of_bound = of_text / bound; simulated = measured seconds / seconds of the "
    "simulator; per_rank = of_text x ranks of the foundation / all ranks"
)
ENCODER = "image_encoder"
SIDES = ("text", "queue", "blocking")
FORWARD, ENCODE = 0.020, 0.012  # seconds that sleeping ranks take; a backward takes twice as long
RANKS, ITEMS = 8, 8  # of the simulated balance


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


def let_sleep(blocks: nn.ModuleList, seconds: float) -> None:
    """Replace the forwards of blocks: together they sleep, and do nothing else."""

    def forward(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        time.sleep(seconds / len(blocks))
        return _SleepInBackward.apply(hidden, 2 * seconds / len(blocks))

    for block in blocks:
        block.forward = forward


def _merged(hidden: Tensor) -> Tensor:
    """The sums of four patches each, in place of a projector."""
    return hidden.view(-1, 4, hidden.size(-1)).sum(1)


class Blocking:
    """A carrier whose sends wait until they are received, and whose receives are posted when they are waited for."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def prepare(self, messages: Sequence[Message]) -> None:
        """Tell the carrier."""
        self._carrier.prepare(messages)

    def post(self, message: Message, number: int) -> Arrival:
        """Post nothing yet."""
        return _Later(self._carrier, message, number)

    def send(self, tensors: Any, message: Message, part: Part, number: int) -> Departure:
        """Send a part, and wait until it has left."""
        self._carrier.send(tensors, message, part, number).wait()
        return _Gone()


@dataclass(frozen=True)
class _Later:
    carrier: Carrier
    message: Message
    number: int

    def wait(self) -> tuple[Tensor, ...]:
        return self.carrier.post(self.message, self.number).wait()


class _Gone:
    def wait(self) -> None:
        pass


@dataclass
class Side:
    """One of the sides on this rank."""

    model: OmniModel
    batch: Any

    def step(self) -> tuple[float, list[tuple[float, float]]]:
        """Run a step; return its seconds on the slowest rank, and when each of this rank's actions began and ended."""
        recorder = SpanRecorder()
        schedule = schedule_of(self.model, self.batch.plan)
        dist.barrier()
        recorder.begin()
        executor = Executor(self.model, self.batch, {}, recorder=recorder)
        began = time.perf_counter()
        executor.run(schedule)
        taken = torch.tensor(time.perf_counter() - began)
        spans = [(span.start, span.end) for span in recorder.end().spans if span.what.kind == "action"]
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        self.model.zero_grad(set_to_none=True)
        return taken.item(), spans


def sides_of(kind: str, given: argparse.Namespace) -> dict[str, Side]:
    """Build the sides; both ranks call it."""
    sides: dict[str, Side] = {}
    for name in SIDES:
        section = Section(components=[ENCODER], ranks=1, in_flight=1 if name == "blocking" else None)
        plan = ParallelPlan(components={ENCODER: ComponentPlan()}, sections={"vision": section})
        carrier = torch_carrier if name != "blocking" else lambda *arguments: Blocking(torch_carrier(*arguments))
        with patch("omnitrain.parallel.sections.edges.torch_carrier", carrier):
            model = build_parallelize_model(
                model_of(given.width),
                parallel_state=init_state_of(plan),
                parallel_plan=plan,
                enable_mixed_precision=False,
            )
        if kind == "sleep":
            let_sleep(text_blocks(model.foundation), FORWARD)
            visual = model.foundation.model.visual
            let_sleep(visual.blocks, ENCODE)
            for merger in (visual.merger, *visual.deepstack_merger_list):
                merger.forward = _merged
        sizes = (1, given.text, given.grid if kind == "compute" else given.sleep_grid)
        packs = [
            pack_of(model, *sizes, seed, has_media=seed % 2 == 0 and name != "text") for seed in range(given.number)
        ]
        batch = step_planner(model)(packs if dist.get_rank() == 0 else [])
        sides[name] = Side(model, batch)
    return sides


def simulated(side: Side, taken: list[list[tuple[float, float]]], bits: float) -> tuple[Schedule, Timeline]:
    """Simulate a step with the seconds of each of its actions that compute, and the rate of the link (0: no limit)."""
    schedule, plan = schedule_of(side.model, side.batch.plan), side.batch.plan
    seconds = {
        (action.kind, action.micro_batch): end - began
        for row, of_row in zip(schedule.actions, taken, strict=True)
        for action, (began, end) in zip(row, of_row, strict=True)
        if action.passes or action.kind in (Kind.ENCODE, Kind.ENCODE_B)
    }
    (edge,) = layout_of(side.model).edges.values()

    def message_bytes(action: Action) -> int:
        if action.micro_batch is None:
            return 0
        return sum(message.bytes for message in messages_of(plan, ENCODER, action.micro_batch, edge.form.rows))

    link = MessageCost(bandwidth=bits / 8, message_bytes=message_bytes) if bits else None
    return schedule, simulate(schedule, lambda action: seconds.get((action.kind, action.micro_batch), 0.0), link)


def run_rank(given: argparse.Namespace) -> dict[str, Any]:
    """Measure both kinds on one rank; return the charts, and figure -> its value in each round."""
    found: dict[str, list[float]] = defaultdict(list)
    charts: list[str] = []
    if given.bits and dist.get_rank() == 0:
        limit(given.bits)
    for kind in given.kinds:
        sides = sides_of(kind, given)
        for index in range(-1, given.rounds):  # one round to warm up
            steps = {name: sides[name].step() for name in in_turn(SIDES, index)}
            everyone: list[Any] = [None, None]
            dist.all_gather_object(everyone, {name: spans for name, (_, spans) in steps.items()})
            schedule, timeline = simulated(sides["queue"], [of["queue"] for of in everyone], given.bits)
            _, free = simulated(sides["queue"], [of["queue"] for of in everyone], 0.0)
            if index < 0:
                continue
            text = steps["text"][0]
            for name, (seconds, _) in steps.items():
                found[f"{kind}_{name}_seconds"].append(seconds)
            found[f"{kind}_of_text"].append(text / steps["queue"][0])
            found[f"{kind}_blocking_of_text"].append(text / steps["blocking"][0])
            found[f"{kind}_bound"].append(text / float(free.makespan))
            found[f"{kind}_of_bound"].append(float(free.makespan) / steps["queue"][0])
            found[f"{kind}_simulated"].append(steps["queue"][0] / float(timeline.makespan))
        ran = as_timeline(schedule, [of["queue"] for of in everyone])
        charts += [f"{kind}, simulated:\n{gantt(timeline)}{kind}, as it ran:\n{gantt(ran)}"]
    return {"charts": charts, "rounds": found}


def as_timeline(schedule: Schedule, taken: Sequence[Sequence[tuple[float, float]]]) -> Timeline:
    """Return a step that ran as a timeline, to draw it below the simulated one.

    Args:
        schedule: the schedule that ran.
        taken: ``[ranks][actions]``, start and end of each action in seconds from the start of the step.
    """
    rows = []
    for row, of_row in zip(schedule.actions, taken, strict=True):
        events = []
        for action, (begin, end) in zip(row, of_row, strict=True):
            events.append(Event(action, begin, end))
        rows.append(tuple(events))
    return Timeline(schedule, tuple(rows))


def balance(number: int) -> dict[str, float]:
    """Simulate an encoder on all ranks, and on ranks of its own: every share of media and size of the encoder."""
    figures = {}
    for share, work in product((0.1, 1 / 3, 1.0), (0.2, 0.5)):
        drawn = np.random.default_rng(0).random((number, RANKS)) < share  # micro-batches with media
        name = f"balance_media_{share:.2f}_encoder_{work}"
        text = 3.0 * number
        seconds = {
            "local": 3.0 * sum(1 + work * bool(of_ranks.any()) for of_ranks in drawn),
            "world": 3.0 * sum(1 + _largest(int(of_ranks.sum()), work) for of_ranks in drawn),
        }
        for place, taken in seconds.items():
            figures[f"{name}_{place}_of_text"] = text / taken
        for ranks in (1, 2):
            taken, use = _with_section(drawn, work, ranks)
            figures[f"{name}_section_{ranks}_of_text"] = text / taken
            figures[f"{name}_section_{ranks}_per_rank"] = text / taken * RANKS / (RANKS + ranks)
            figures[f"{name}_section_{ranks}_use"] = use
    return figures


def _largest(num_media: int, work: float) -> float:
    """The work of the busiest rank if all items of a micro-batch are dealt."""
    items = np.zeros(num_media * ITEMS, dtype=np.int64)
    loads = np.bincount(assign_by_cost(items, items + 1, np.array([RANKS])), minlength=RANKS)
    return float(loads.max()) * work / ITEMS


def _with_section(drawn: np.ndarray, work: float, ranks: int) -> tuple[float, float]:
    """Seconds of a step of a section with ``ranks`` ranks, in forwards of a micro-batch, and the busy share of it."""
    windows = [index for index, of_ranks in enumerate(drawn) if of_ranks.any()]
    encodes = {window: work * int(drawn[window].sum()) / ranks for window in windows}

    def seconds(action: Action) -> float:
        if action.kind in (Kind.ENCODE, Kind.ENCODE_B):
            assert action.micro_batch is not None
            return encodes[action.micro_batch] * (2 if action.kind is Kind.ENCODE_B else 1)
        return {Kind.F: 1.0, Kind.B: 2.0}.get(action.kind, 0.0)

    section = SectionWindows("vision", {ENCODER: windows}, frozenset([ENCODER]), 1, 2)
    schedule = with_sections(accumulate(len(drawn)), [section], seconds, lambda _, window: encodes[window])
    timeline = simulate(schedule, seconds)
    return float(timeline.makespan), float(1 - timeline.idle(1) / timeline.makespan)


def main() -> None:
    """See the top of this file."""
    options = parser(__doc__ or "", rounds=7, steps=1)
    options.add_argument("--number", type=int, default=32, help="micro-batches of a step")
    options.add_argument("--width", type=int, default=192, help="of the model")
    options.add_argument("--text", type=int, default=256, help="tokens of text in a pack")
    options.add_argument("--grid", type=int, default=16, help="patches of an image along each side")
    options.add_argument("--sleep-grid", type=int, default=48, help="the same where blocks sleep")
    options.add_argument("--bits", type=float, default=4e8, help="per second on the link; 0: no limit")
    options.add_argument("--kinds", nargs="*", default=["sleep", "compute"], help="what is measured")
    options.add_argument("--as-rank", action="store_true", help="be one of the ranks")
    given = start(options)
    if given.as_rank:
        with joined_ranks():
            print(json.dumps(run_rank(given)))
        return
    if given.bits and not may_limit():
        print("without a slow link: cannot limit the loopback; run as root with iproute2 (ip, tc)")
        given.bits = 0.0
    sizes = ("rounds", "number", "width", "text", "grid", "sleep_grid", "bits")
    arguments = [f"--{name.replace('_', '-')}={getattr(given, name)}" for name in sizes]
    measured = run_ranks(__file__, [*arguments, "--kinds", *given.kinds], ranks=2, is_limited=bool(given.bits))
    print("\n".join(measured["charts"]))
    figures = {name: median(values) for name, values in measured["rounds"].items()}
    report(Result("sections", FORMULA, figures | balance(given.number), measured["rounds"]), given.json)


if __name__ == "__main__":
    main()
