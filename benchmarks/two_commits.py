"""Two commits of this repository, compared by its own benchmarks: does a change cost time or memory?

    python benchmarks/two_commits.py OLD_CHECKOUT --json benchmarks/results/two_commits.json

Each round runs each benchmark once in both checkouts, in turns, one round at a time. A figure got worse if its median
in the new checkout is worse than the worst round of the old one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from harness import ROOT, Result, in_turn, report

SIDES = ("old", "new")
FORMULA = "NAME.FIGURE = median of the new commit's rounds / median of the old commit's rounds"

# Benchmark -> the figures that are compared.
LOWER_IS_BETTER = {
    "step_overhead": ("overhead", "cpu_overhead", "trainer_seconds_per_step", "trainer_cpu_seconds_per_step"),
    "padding": (),
    "layouts": (
        "text_time_ratio",
        "text_memory_ratio",
        "text_omnitrain_cpu_seconds_per_step",
        "vlm_time_ratio",
        "vlm_memory_ratio",
        "vlm_omnitrain_cpu_seconds_per_step",
    ),
    "moe_overlap": ("overlap_seconds_0.5x", "overlap_seconds_1x", "overlap_seconds_2x", "peak_ratio"),
    "ulysses": ("async_seconds", "plain_seconds"),
}
HIGHER_IS_BETTER = {
    "padding": ("ratio", "omnitrain_tokens_per_second"),
    "moe_overlap": ("hidden_0.5x", "hidden_1x", "hidden_2x"),
    "ulysses": ("hidden_share",),
}


def main() -> None:
    """Run all rounds; report the ratio of each figure and which got worse."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("old", type=Path, help="a checkout of the commit to compare with")
    options.add_argument(
        "--names", nargs="+", choices=LOWER_IS_BETTER, default=list(LOWER_IS_BETTER), help="benchmarks"
    )
    options.add_argument("--rounds", type=int, default=5, help="runs of each benchmark in each checkout")
    options.add_argument("--arguments", default="", help="further words for each benchmark, such as '--steps 10'")
    options.add_argument("--json", type=Path, help="also write the result to this file")
    given = options.parse_args()
    checkouts = {"old": given.old.resolve(), "new": ROOT}
    figures: dict[str, float] = {}
    rounds: dict[str, list[float]] = {}
    for name in given.names:
        of_side: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for index in range(given.rounds):
            for side in in_turn(SIDES, index):
                of_side[side].append(figures_of(checkouts[side], name, given.arguments.split()))
        for figure in (*LOWER_IS_BETTER[name], *HIGHER_IS_BETTER.get(name, ())):
            values = {side: [one[figure] for one in of_side[side]] for side in SIDES}
            rounds |= {f"{name}.{figure} {side}": values[side] for side in SIDES}
            figures[f"{name}.{figure}"] = median(values["new"]) / median(values["old"])
            sign = 1 if figure in LOWER_IS_BETTER[name] else -1
            if sign * median(values["new"]) > max(sign * value for value in values["old"]):
                print(f"WORSE {name}.{figure}: old {values['old']}, new {values['new']}")
    report(Result("two_commits", FORMULA, figures, rounds), given.json)


def figures_of(checkout: Path, name: str, arguments: list[str]) -> dict[str, float]:
    """The figures of one round of a benchmark in ``checkout``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, f"benchmarks/{name}.py", "--rounds", "1", "--json", str(path), *arguments]
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
        figures: dict[str, float] = json.loads(path.read_text())["figures"]
        return figures


if __name__ == "__main__":
    main()
