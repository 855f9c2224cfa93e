"""Memory of long rows: the cost of sharing a sequence between ranks, and the longest row that fits.

A random Qwen3 in fp32 on gloo ranks with one thread each, blocks recomputed in the backward, the loss in chunks; a step
is what ``Trainer`` does. Peak memory is the largest sum of live tensor bytes of rank 0 within a step, as torch's
profiler sees the allocator.

- ``memory_ratio``: four ranks with a row of four times the tokens against one rank with the row.
- ``longest_...``: the longest row that four ranks train within a budget per rank. By formula: the peak is a line, whose
  slope per own token is taken from two short rows on one rank, and whose start from a short row on all ranks. By
  measurement: rows of fixed lengths, several runs of each, because buffers on their way between ranks are held longer
  in one run than in another; where the line through the medians crosses the budget. Each for two budgets.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import numpy as np
import torch
from harness import Result, parser, peak_of, report, start
from omni_step import OmniStep
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.models.discovery import discover
from omnitrain.models.hf.load import foundation_class
from omnitrain.models.hf.samples import to_samples
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import Optimizer, ParallelPlan
from omnitrain.recipe.parallel import ComponentPlan

FORMULA = (
    "memory_ratio = peak of a rank with 4 T tokens on 4 ranks / with T tokens on 1; "
    "longest_by_formula = ranks (budget - peak(short row) + slope own tokens of it) / slope, "
    "slope = peak difference of two rows / their difference in tokens, on one rank; "
    "longest_by_measurement = where the line through the median peaks of rows of fixed lengths first crosses the budget"
)
RANKS = 4
TIMEOUT_SECONDS = 1800.0
SETTINGS = Optimizer(learning_rate=1e-4, warmup_steps=0, schedule="constant")


def fresh() -> PreTrainedModel:
    """A Qwen3 of 0.2 million parameters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
    )
    return foundation_class(config)(config).train()


def pack_of(model: PreTrainedModel, tokens: int) -> Pack:
    """One sample, the same on all ranks."""
    ids = np.random.default_rng(0).integers(1, 250, tokens)
    return Pack.from_samples(to_samples(discover(model), [{"input_ids": ids, "labels": ids}]))


def peak_on_rank(tokens: int, ranks: int) -> int:
    """Largest sum of live tensor bytes in the second and third step over a row of ``tokens``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model = fresh()
        pack = pack_of(model, tokens)
        plan = ParallelPlan(
            default=ComponentPlan(memory={"recompute": "full"}), components={"foundation": ComponentPlan(ulysses=ranks)}
        )
        step = OmniStep(model, plan, SETTINGS, torch.device("cpu"))
        step.run([pack])
        gc.collect()
        with record_function("measured steps"):
            for _ in range(2):  # how long buffers on their way are held differs a little from step to step
                step.run([pack])
        step.close()
    return peak_of(profiled, "measured steps")


class Peaks:
    """Median peaks of rank 0 over several runs, each length measured once."""

    def __init__(self, pool: RankPool, runs: int) -> None:
        self._pool = pool
        self._runs = runs
        self.found: dict[tuple[int, int], list[int]] = {}

    def of(self, tokens: int, ranks: int) -> float:
        """Peak in bytes."""
        if (tokens, ranks) not in self.found:
            self.found[tokens, ranks] = [self._run(tokens, ranks) for _ in range(self._runs)]
        return median(self.found[tokens, ranks])

    def _run(self, tokens: int, ranks: int) -> int:
        peaks = self._pool.run("long_context:peak_on_rank", tokens, ranks, timeout_s=TIMEOUT_SECONDS, world=ranks)
        own: int = peaks[0]
        return own


def longest_by_formula(peaks: Peaks, budget: float, short: int) -> float:
    """Return the tokens of the longest row on all ranks."""
    slope = (peaks.of(2 * short, 1) - peaks.of(short, 1)) / short
    return RANKS * (budget - peaks.of(RANKS * short, RANKS) + slope * short) / slope


def longest_by_measurement(peaks: Peaks, budget: float, grid: Sequence[int]) -> float:
    """Tokens at which the line through the peaks of rows of these lengths first crosses the budget."""
    for shorter, longer in pairwise(grid):
        low, high = peaks.of(shorter, RANKS), peaks.of(longer, RANKS)
        if low <= budget < high:
            return shorter + (longer - shorter) * (budget - low) / (high - low)
    shown = ", ".join(f"{tokens} tokens {peaks.of(tokens, RANKS):,.0f}" for tokens in (grid[0], grid[-1]))
    sys.exit(f"no peak crosses {budget:,.0f} bytes ({shown}); choose other --budgets or --lengths")


def measure(tokens: int, budgets: list[float], lengths: int, runs: int) -> Result:
    """Both comparisons.

    Args:
        tokens: of the short row on one rank.
        budgets: of a rank, in peaks of that row.
        lengths: of rows on all ranks: as many tokens per rank as the short row, half as many more, ...
        runs: of each length.
    """
    grid = [RANKS * tokens * (2 + index) // 2 for index in range(lengths)]
    with RankPool(RANKS, preload=("long_context",)) as pool:
        peaks = Peaks(pool, runs)
        figures = {"memory_ratio": peaks.of(RANKS * tokens, RANKS) / peaks.of(tokens, 1)}
        for times in budgets:
            budget = times * peaks.of(tokens, 1)
            by_formula = longest_by_formula(peaks, budget, tokens)
            measured = longest_by_measurement(peaks, budget, grid)
            budget_name = f"{budget / 2**20:.1f}_mib"
            figures |= {
                f"longest_by_formula_{budget_name}": by_formula,
                f"longest_by_measurement_{budget_name}": measured,
                f"formula_to_measurement_{budget_name}": by_formula / measured,
            }
    rounds = {
        f"{tokens}_tokens_on_{ranks}_peak_mib": [size / 2**20 for size in sizes]
        for (tokens, ranks), sizes in sorted(peaks.found.items())
    }
    return Result("long_context", FORMULA, figures, rounds)


def main() -> None:
    """Measure and report."""
    options = parser(sys.modules[__name__].__doc__ or "", rounds=3, steps=1)
    options.add_argument("--tokens", type=int, default=1024, help="of the short row on one rank")
    options.add_argument("--budgets", type=float, nargs="+", default=[2.0, 3.0], help="in peaks of that row")
    options.add_argument("--lengths", type=int, default=8, help="of rows on all ranks, at most")
    given = start(options)
    report(measure(given.tokens, given.budgets, given.lengths, given.rounds), given.json)


if __name__ == "__main__":
    main()
