"""How far training the quickstart's model under a layout is from training it in one process.

Errors are relative to the largest number of their tensor, as ``omnitrain verify`` reports them.
"""

from __future__ import annotations

import time

from harness import QUICKSTART, Result, parser, report, start

from omnitrain.recipe import Recipe
from omnitrain.train.verbs.verify import verify_recipe

FORMULA = "error = max |layout - one process| / max |one process|; of all gradients, and of weights after three steps"
LAYOUTS = ("dp2", "hsdp2x2.accum2", "tp2", "pp2")


def main() -> None:
    """Verify each layout; report the worst errors."""
    options = parser(__doc__ or "", rounds=1, steps=3)
    options.add_argument("--samples", type=int, default=12, help="samples of the global batch")
    options.add_argument("--layouts", nargs="+", default=LAYOUTS, help="layouts, as of `omnitrain verify`")
    given = start(options)
    began = time.perf_counter()
    verified = verify_recipe(Recipe.load(QUICKSTART), given.layouts, num_samples=given.samples)
    assert verified.ok, [row.reason for row in verified.rows]
    figures: dict[str, float] = {}
    for name in ("loss", "grad", "weight"):
        errors = {row.layout: getattr(row, f"{name}_error") for row in verified.rows}
        figures |= {f"{name}_error": max(errors.values())}
        figures |= {f"{layout}_{name}_error": error for layout, error in errors.items()}
    report(Result("verified", FORMULA, figures, {"seconds": [time.perf_counter() - began]}), given.json)


if __name__ == "__main__":
    main()
