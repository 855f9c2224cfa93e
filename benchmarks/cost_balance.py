"""How evenly the packs of a step are divided among ranks by cost, and how long it takes to divide them.

Nothing is trained: the samples of a skewed mixture have lengths and patches only. ``alone``: 64 samples for each rank,
each in a pack of its own, as for models that cannot keep samples apart. ``packs``: 8 packs of 8,192 tokens for each
rank, made by the packer. A pack costs its tokens, the squares of its samples' lengths, and the patches of its images,
which each rank encodes for its own packs.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
from harness import Result, parser, report, start
from packing import ENCODER, MEDIA_NAMES, PATCHES, TOKENS, mixture, packed

from omnitrain.data.packing.budget import PackBudget
from omnitrain.plan.wavefront.step import dealt_packs, step_seconds

FORMULA = (
    "cost of a pack = sum(l) + sum(l^2) / 2,048 + patches / 2 over its samples of l tokens; *_imbalance = largest cost "
    "of a rank / max(mean cost of the ranks, largest sample); *_rounds = sum over micro-batches of the largest cost of "
    "a rank / the same, for ranks that wait for each other in each layer (FSDP); drawn_*: as they were drawn; "
    "milliseconds: to deal 4,096 packs to 64 ranks (mean of ranks that wait and that do not; median of the rounds)"
)
RANKS = (8, 64)
PER_RANK = 8  # packs of a rank in a step
QUADRATIC = 1 / 2048  # attention takes as long as the rest at 2,048 tokens
PER_PATCH = 0.5


def costs(packs: list[list], least: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the costs of packs in the foundation and in the encoder, in a random order, and of the largest sample."""
    order = np.random.default_rng(0).permutation(len(packs))[:least]
    chosen = [packs[index] for index in order]
    foundation = [[len(one) + QUADRATIC * len(one) ** 2 for one in pack] for pack in chosen]
    encoder = [[PER_PATCH * one.elements.get(ENCODER, 0) for one in pack] for pack in chosen]
    largest = max(float(np.add(*both).max()) for both in zip(foundation, encoder, strict=True))
    return np.array(list(map(sum, foundation))), np.array(list(map(sum, encoder))), largest


def figures_of(work: np.ndarray, load: np.ndarray, largest: float, ranks: int) -> dict[str, float]:
    """Return the imbalance of a step, dealt and as drawn."""
    found = {}
    drawn = list(np.arange(len(work)).reshape(ranks, -1))
    bound = max((work + load).sum() / ranks, largest)
    for name, coupled in (("imbalance", False), ("rounds", True)):
        dealt = dealt_packs(work, load, ranks, coupled=coupled)
        for prefix, lanes in (("", dealt), ("drawn_", drawn)):
            found[f"{prefix}{name}"] = step_seconds(work, load, lanes, coupled=coupled) / bound
    return found


def measure(rounds: int, number: int) -> Result:
    """Deal ``number`` packs, and time it."""
    sizes = mixture(number)
    budget = PackBudget(TOKENS, {ENCODER: PATCHES}, MEDIA_NAMES)
    kinds = {"alone": [[one] for one in sizes], "packs": packed(mixture(13 * max(RANKS) * PER_RANK), budget)[0]}
    figures: dict[str, float] = {}
    for kind, packs in kinds.items():
        for ranks in RANKS:
            per_rank = number // max(RANKS) if kind == "alone" else PER_RANK
            of_step = figures_of(*costs(packs, ranks * per_rank), ranks)
            figures |= {f"{kind}_{ranks}_ranks_{name}": value for name, value in of_step.items()}
    work, load, _ = costs(kinds["alone"], number)
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        for coupled in (False, True):
            dealt_packs(work, load, max(RANKS), coupled=coupled)
        taken.append(1000 * (time.perf_counter() - began) / 2)
    figures["milliseconds"] = median(taken)
    return Result("cost_balance", FORMULA, figures, {"milliseconds": taken})


if __name__ == "__main__":
    options = parser(__doc__ or "", rounds=7, steps=1)
    options.add_argument("--samples", type=int, default=4096, help="samples of a step")
    given = start(options)
    report(measure(given.rounds, given.samples), given.json)
