"""The time that a rank needs to plan a step, once it has the tables of all ranks.

Timed is what the loader does a batch ahead: decode the gathered tables, plan the step, and read off one rank's calls
and routes in every micro-batch. One encoder on 64 ranks encodes images and videos; costs are log-normal, so that some
items are many times the mean. ``few`` has 1,000 items in all, ``many`` has 1,000 on each rank; with ``world`` they are
balanced over all ranks, with ``local`` they stay where they are. ``over_unavoidable`` is the cost of the busiest rank,
in the worst micro-batch, over the larger of the mean and the costliest item. ``cpu_seconds`` tells work from waiting
for a core.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import numpy as np
from harness import Result, parser, report, start

from omnitrain.plan import (
    ItemFacts,
    MicroBatchFacts,
    Placement,
    StepPlan,
    Topology,
    decode_tables,
    encode_table,
    needed_capacity,
    padded,
    plan_step,
)
from omnitrain.plan.placement import Place

FORMULA = "seconds = median over rounds of (seconds to decode, plan and read off one rank's work / steps)"
RANKS = 64
MICRO_BATCHES = 4
ENCODER = "image_encoder"
MEDIA = ("image", "video")


def topology(place: Place) -> Topology:
    """An encoder and a foundation on all ranks."""
    everyone = tuple(range(RANKS))
    encoder = Placement(ENCODER, everyone, MEDIA, place=place)
    return Topology(RANKS, (encoder, Placement("foundation", everyone, reads_packs=True)), ("text",))


def gathered_tables(given: Topology, num_items: int) -> np.ndarray:
    """Return tables ``[ranks, words]`` of ``num_items`` items in total, of two shapes, as an all-gather gives them."""
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(num_items, np.full(RANKS * MICRO_BATCHES * len(MEDIA), 1 / (RANKS * MICRO_BATCHES * 2)))
    facts = [
        tuple(MicroBatchFacts({"text": 512}, (256,) * 8, _items(rng, cells)) for cells in of_rank)
        for of_rank in drawn.reshape(RANKS, MICRO_BATCHES, len(MEDIA)).tolist()
    ]
    words = [encode_table(given, own) for own in facts]
    return np.stack([padded(own, needed_capacity(words)) for own in words])


def _items(rng: np.random.Generator, counts: list[int]) -> dict[str, tuple[ItemFacts, ...]]:
    return {
        medium: tuple(ItemFacts(int(cost), 1 + int(cost), int(cost) % 2) for cost in rng.lognormal(5, 1, count))
        for medium, count in zip(MEDIA, counts, strict=True)
    }


def plan_once(given: Topology, gathered: np.ndarray) -> StepPlan:
    """Run the timed code."""
    plan = plan_step(given, decode_tables(given, gathered))
    for micro_batch in range(plan.num_micro_batches):
        plan.calls_of(RANKS // 2, ENCODER, micro_batch)
        plan.routes(ENCODER, micro_batch)
    return plan


def over_unavoidable(plan: StepPlan) -> float:
    """Return the cost of the busiest rank over the lower bound of any assignment, in the worst micro-batch."""
    loads, costliest = plan.loads(ENCODER), np.zeros(plan.num_micro_batches)
    np.maximum.at(costliest, plan.slot // len(MEDIA), plan.cost)
    least = np.maximum(loads.mean(axis=1), costliest)
    works = least > 0
    return float((loads.max(axis=1)[works] / least[works]).max())


def measure(rounds: int, steps: int, items_per_rank: int) -> Result:
    """Measure all cases in every round, after one warm-up step each."""
    figures, measured = {}, {}
    for place in ("world", "local"):
        for size, num_items in (("few", items_per_rank), ("many", items_per_rank * RANKS)):
            given, name = topology(place), f"{size}_{place}"
            gathered = gathered_tables(given, num_items)
            plan = plan_once(given, gathered)
            for _ in range(rounds):
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(steps):
                    plan_once(given, gathered)
                measured.setdefault(f"{name}_seconds", []).append((time.perf_counter() - wall) / steps)
                measured.setdefault(f"{name}_cpu_seconds", []).append((time.process_time() - cpu) / steps)
            figures |= {f"{name}_{kind}": median(measured[f"{name}_{kind}"]) for kind in ("seconds", "cpu_seconds")}
            figures |= {
                f"{name}_items": float(num_items),
                f"{name}_over_unavoidable": over_unavoidable(plan),
            }
    return Result("step_plan", FORMULA, figures, measured)


def main() -> None:
    """Measure and report."""
    arguments = parser(sys.modules[__name__].__doc__ or "", rounds=7, steps=20)
    arguments.add_argument("--items", type=int, default=1000, help="items of `few`, and of each rank of `many`")
    options = start(arguments)
    report(measure(options.rounds, options.steps, options.items), options.json)


if __name__ == "__main__":
    main()
