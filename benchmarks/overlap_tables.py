"""Pairs of micro-batches against DualPipe, simulated: bubble, parameters and activations.

Pairs run in interleaved 1F1B (``v`` chunks on each of ``p`` ranks; 1: plain 1F1B), in which each rank does one more
forward before its first backward. The simulator runs the schedules with equal stages and free messages; the forward of
a rank's blocks takes 1, and the gradients of inputs and of weights 1 each. DualPipe's figures are those of table 2 of
the DeepSeek-V3 report (arXiv 2412.19437): bubble ``(p / 2 - 1) (F&B + B - 3 W)``, where a forward and a backward that
overlap take ``F&B``, here as long as one after the other; parameters twice; activations ``p + 1``.

``bubble`` is the idle time of a rank. ``activations`` is the largest number of micro-batches that a rank keeps, where a
chunk of a micro-batch counts ``1 / v``. ``more_chunks`` is the number of chunks that a rank keeps more than without
pairs.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from itertools import product
from pathlib import Path

from harness import Result, report, start

from omnitrain.plan.schedule.actions import Kind
from omnitrain.plan.schedule.generators import interleaved
from omnitrain.plan.schedule.simulate import simulate

FORMULA = "bubble = simulated seconds of a step - micro-batches * (F + B); activations = peak of live chunks / v"
RANKS = (2, 4, 8, 16)
CHUNKS = (1, 2, 4, 8)
FORWARD, BACKWARD, WEIGHTS = 1, 2, 1


def pairs_of(num_ranks: int, num_chunks: int) -> dict[str, Fraction]:
    """Return the figures of pairs."""
    number = 4 * num_ranks
    plain, paired = (interleaved(num_ranks, num_chunks, number, overlap=overlap) for overlap in (False, True))
    seconds = {Kind.F: Fraction(FORWARD, num_chunks), Kind.B: Fraction(BACKWARD, num_chunks)}
    kept = max(paired.peak_live())
    return {
        "bubble": simulate(paired, seconds).makespan - number * (FORWARD + BACKWARD),
        "activations": Fraction(kept, num_chunks),
        "more_chunks": Fraction(kept - max(plain.peak_live())),
        "parameters": Fraction(1),
    }


def dual_pipe(num_ranks: int) -> dict[str, Fraction]:
    """Return the published figures of DualPipe."""
    together = FORWARD + BACKWARD
    return {
        "bubble": (Fraction(num_ranks, 2) - 1) * (together + BACKWARD - 3 * WEIGHTS),
        "activations": Fraction(num_ranks + 1),
        "parameters": Fraction(2),
    }


def main() -> None:
    """See the top of this file."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="also write the result to this file")
    given = start(options)
    figures = {}
    for ranks, chunks in product(RANKS, CHUNKS):
        figures |= {f"pp{ranks}_v{chunks}_{name}": float(value) for name, value in pairs_of(ranks, chunks).items()}
    for ranks in RANKS:
        figures |= {f"pp{ranks}_dualpipe_{name}": float(value) for name, value in dual_pipe(ranks).items()}
    report(Result("overlap_tables", FORMULA, figures, {}), given.json)


if __name__ == "__main__":
    main()
