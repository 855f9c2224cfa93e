"""Speed of a mixture of experts on one GPU: the exchange of experts, and omnitrain against HF ``Trainer``.

The model is random, with the widths of Qwen3-30B-A3B (128 experts of 768 per layer, 8 per token) and as many layers as
fit, at most :data:`MOST_LAYERS`. ``dense.py`` says how packs, precision and rounds are made. Sides:

- ``local``: omnitrain, whose experts read their rows where they are;
- ``loopback N``: omnitrain with the exchange of many ranks in N chunks, over a link of this rank to itself, which
  copies: what the exchange costs without a network;
- ``HF grouped_mm``: HF ``Trainer`` with transformers' fastest experts, which multiply in fp32, since autocast does not
  cover grouped products;
- ``HF grouped_mm bf16``: the same function, with weights and rows cast to bf16 first.

Before them the exchange runs random steps over a link that sends as late as it may (``loopback.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from gpu.batches import batches_of
from gpu.loopback import PromptLoopback, over
from gpu.measured import Figures, Load, Sides
from gpu.sides import run_hf, run_omnitrain
from gpu.sizes import config_of, layers_that_fit, sizes_of
from omnitrain.recipe import Ops
from omnitrain.recipe.parallel import ComponentPlan

MOST_LAYERS, TOKENS = 2, 8192
CHUNKS = (1, 2, 4, 8)
IN_BF16 = "grouped_mm_in_bf16"  # in the registry of transformers


class WeightsInBf16:
    """Experts whose weights are cast to bf16 when their function reads them."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.bfloat16() if isinstance(value, nn.Parameter) else value


def grouped_mm_in_bf16(experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Transformers' ``grouped_mm``, as autocast would have it if it knew grouped products."""
    seen: Any = WeightsInBf16(experts)
    return grouped_mm_experts_forward(seen, hidden.bfloat16(), index, weights).to(hidden.dtype)


ExpertsInterface.register(IN_BF16, grouped_mm_in_bf16)


def run(tiny: bool, folder: Path) -> Figures:
    """Yield the speed of each side, and its ratio to that of HF."""
    load, sizes = Load.of(tiny, TOKENS), sizes_of("experts", tiny)
    layers = layers_that_fit("experts", sizes, load, MOST_LAYERS)
    config: Callable[[], Any] = partial(config_of, "experts", sizes, layers)
    batches = batches_of("experts", sizes, config(), load)
    yield "layers", float(layers)
    yield "tokens per pack", float(load.tokens)
    ops = Ops(attention="varlen" if load.device.type == "cuda" else "auto")
    ours = partial(run_omnitrain, batches=batches, load=load, foundation=ComponentPlan(), ops=ops)
    sides = Sides(load.device)

    def theirs(implementation: str) -> Any:
        made = config()
        made._experts_implementation = implementation
        return run_hf(made, batches, load, {"swiglu": False})  # liger has experts of its own under this name

    yield from sides.run({"local": lambda: ours(config())})
    chunked = {f"loopback {n}": partial(over, PromptLoopback(), n) for n in CHUNKS}
    yield from sides.run({name: lambda alter=alter: ours(config(), alter=alter) for name, alter in chunked.items()})
    yield from sides.run({"HF grouped_mm bf16": lambda: theirs(IN_BF16), "HF grouped_mm": lambda: theirs("grouped_mm")})
    yield from sides.ratios("HF")
    yield from sides.ratios("local")
    yield from sides.finish("local")
