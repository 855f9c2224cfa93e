"""Speed of a dense language model on one GPU: omnitrain against HF ``Trainer`` with liger's kernels, on the same packs.

The model is random, with the widths of Qwen3-4B and as many layers as fit, at most :data:`MOST_LAYERS`. State is fp32
(weights, gradients, Adam), computation bf16. Both sides attend by torch's varlen kernel. Samples are text of this
repository, prepared before anything is timed; every token is predicted. HF runs under autocast, with liger where it is
installed. A round is some optimizer steps; the device is synchronised at its ends only. Sides run one after the other;
those of omnitrain come first, since liger changes transformers' modules for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpu.batches import batches_of
from gpu.measured import Figures, Load, Sides
from gpu.sides import run_hf, run_omnitrain
from gpu.sizes import config_of, layers_that_fit, sizes_of
from omnitrain.errors import UserError
from omnitrain.recipe import Ops
from omnitrain.recipe.parallel import ComponentPlan

MOST_LAYERS, TOKENS = 8, 8192
LIGER = {"rms_norm": "liger", "swiglu": "liger", "rotary": "liger", "cross_entropy": "liger"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {  # fields of the plan, and of `model.ops`
    "eager": ({}, {}),
    "compile": ({"compile": True}, {}),
    "liger": ({}, LIGER),
}


def run(tiny: bool, folder: Path) -> Figures:
    """Yield the speed of each side, and its ratio to that of HF."""
    load, sizes = Load.of(tiny, TOKENS), sizes_of("text", tiny)
    layers = layers_that_fit("text", sizes, load, MOST_LAYERS)
    config: Callable[[], Any] = partial(config_of, "text", sizes, layers)
    batches = batches_of("text", sizes, config(), load)
    yield "layers", float(layers)
    yield "tokens per pack", float(load.tokens)
    attention = "varlen" if load.device.type == "cuda" else "auto"
    sides = Sides(load.device)

    def of_omnitrain(kind: str, recompute: str) -> Any:
        fields, ops = KINDS[kind]
        if fields.get("compile") and load.device.type != "cuda":
            raise UserError("compiled blocks are measured only on CUDA")
        plan = ComponentPlan.model_validate(fields | {"memory": {"recompute": recompute}})
        return run_omnitrain(config(), batches, load, plan, Ops.model_validate(ops | {"attention": attention}))

    yield from sides.run({kind: partial(of_omnitrain, kind, "none") for kind in KINDS})
    yield from sides.run({f"{kind} recompute": partial(of_omnitrain, kind, "full") for kind in KINDS})
    yield from sides.run({"HF": lambda: run_hf(config(), batches, load)})
    if "HF" in sides.measured:
        yield "HF uses liger", float(sides.measured["HF"].uses_liger)
    yield from sides.ratios("HF")
    yield from sides.finish("eager")
