"""Training speed of a mixture of experts on one GPU: omnitrain against HF ``Trainer``, and the effect of each part.

The model is random, with the widths of Qwen3-30B-A3B (128 experts of 768 per layer, 8 per token) and as many of its
layers as fit on the side that needs the most memory. State is fp32 and computation is bf16. Packs have ``--tokens``
tokens of the text of this repository, and every token is predicted. ``gpu_train.py`` explains how rounds are timed,
``gpu_operations.py`` how operations and the ceiling are counted.

The sides run one after the other on the same packs:

- ``omnitrain``: the step of ``Trainer``, with blocks compiled on a GPU;
- ``hf_NAME``: HF ``Trainer`` with ``DataCollatorWithFlattening``, once for each implementation of experts that can
  train here: ``grouped_mm``, ``grouped_mm_bf16``, ``eager``, ``sonicmoe`` and ``liger``. Liger's kernels are not tuned,
  because trying its 200 settings would take longer than the rest. Autocast does not cover grouped products, so
  ``grouped_mm`` multiplies in fp32; ``grouped_mm_bf16`` casts weights and rows first and calls the same function.
  omnitrain is compared with the fastest of them.

Then omnitrain runs again, each time with one part replaced by that of transformers. The worth of a part is the seconds
per token without it, divided by the seconds per token with it:

- ``permutation``: experts use the ``grouped_mm`` function of transformers: its sort, gather, products and sums;
- ``router``: blocks are not compiled. Experts are never compiled, so this measures router, norms and rotary positions;
- ``loss``: all logits at once;
- ``recompute``: the backward recomputes the blocks, as for a model that does not fit otherwise. They are not compiled
  either, so compare it with ``router`` to see the cost of the recomputation;
- ``all``: permutation, router and loss together: the model of transformers under FSDP's mixed precision.

Before the sides run, the exchange of experts runs ``--loopback`` random steps on this device, with itself as the peer
(``expert_loopback.py``). If a step is wrong, ``loopback_steps`` is 0, the sides are measured anyway, and the exit code
is 1.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from expert_loopback import check_late_rows
from gpu_batches import batches_of, flattened
from gpu_harness import Measured, Run, attempted, loss_error, measured_one_by_one, report_all, start_on_device
from gpu_operations import ceiling
from gpu_sides import can_use, foundation_plan, run_hf, run_omnitrain
from gpu_sizes import FULL, TINY, Sizes, layers_that_fit
from harness import Result, parser
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.integrations.sonicmoe import is_sonicmoe_loadable

from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.loss import cross_entropy
from omnitrain.recipe.parallel import ComponentPlan

FORMULA = (
    "share_of_ceiling = operations of a round / seconds / ceiling (operations as in gpu_operations.py, with only the "
    "experts that a token uses); ratio_over_hf = omnitrain / best HF side, in tokens per second; worth_PART = "
    "omnitrain / omnitrain with that part of transformers, in tokens per second; medians over rounds"
)
MOE = replace(
    FULL,
    text=FULL.text
    | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_key_value_heads": 4},
)
TINY_MOE = replace(TINY, text=TINY.text | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2})


@dataclass(frozen=True)
class Variant:
    """Omnitrain with some parts replaced by those of transformers."""

    permutation: bool = False
    router: bool = False
    loss: bool = False
    recompute: bool = False


VARIANTS = {
    "permutation": Variant(permutation=True),
    "router": Variant(router=True),
    "loss": Variant(loss=True),
    "recompute": Variant(recompute=True),
    "all": Variant(permutation=True, router=True, loss=True),
}


def config_of(sizes: Sizes, layers: int) -> Any:
    """HF's config of a Qwen3-MoE."""
    return AutoConfig.for_model("qwen3_moe", **sizes.text | {"num_hidden_layers": layers})


def hf_experts(device: torch.device) -> list[str]:
    """Implementations of experts that can train here; transformers' ``batched_mm`` copies the experts per token."""
    sonicmoe = device.type == "cuda" and is_sonicmoe_loadable()
    there = {"grouped_mm": True, "grouped_mm_bf16": True, "eager": True}
    there |= {"sonicmoe": sonicmoe, "liger": can_use("liger_kernel", device)}
    return [name for name, is_there in there.items() if is_there]


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


def use_their_experts(model: OmniModel) -> None:
    """Transformers' whole function, permutation included."""
    model.foundation.set_experts_implementation("grouped_mm")


@contextmanager
def all_logits_at_once(device: torch.device) -> Iterator[None]:
    """Compute the loss in one chunk."""
    usual = cross_entropy.CHUNK_BYTES[device.type]
    cross_entropy.CHUNK_BYTES[device.type] = sys.maxsize
    try:
        yield
    finally:
        cross_entropy.CHUNK_BYTES[device.type] = usual


def plan_of(variant: Variant, given: Namespace) -> ComponentPlan:
    """Of the foundation; torch compiles nothing that is computed again."""
    plan = foundation_plan(given)
    if variant.router or variant.recompute:
        plan = plan.model_copy(update={"compile": False})
    return plan.model_copy(update={"recompute": "full"}) if variant.recompute else plan


def run_variant(variant: Variant, config: Any, packs: Any, given: Namespace) -> Measured:
    """Run omnitrain's side, with the replaced parts of the variant."""
    alter = use_their_experts if variant.permutation else None
    with all_logits_at_once(given.device) if variant.loss else nullcontext():
        return run_omnitrain(config, packs, given, plan_of(variant, given), alter)


def run_theirs(implementation: str, config: Any, packs: Any, given: Namespace) -> Measured:
    """HF ``Trainer``, its experts by ``implementation``; liger has experts of its own, under the name of its MLPs."""
    is_liger = implementation == "liger"
    config._experts_implementation = "eager" if is_liger else implementation
    return run_hf(flattened, config, packs, given, {"swiglu": is_liger})


def run_loopback(device: torch.device, steps: int) -> int:
    """The number of ``steps``, all of which were right."""
    check_late_rows(device, torch.bfloat16 if device.type == "cuda" else torch.float32, steps)
    return steps


def measure(given: Namespace) -> Result:
    """Measure all sides."""
    sizes, device = TINY_MOE if given.tiny else MOE, given.device
    loopback = attempted("loopback", partial(run_loopback, device, given.loopback))
    limit = ceiling(sizes.matmul, device)
    layers = given.layers or layers_that_fit("text", sizes, given, vocabulary_matrices=2)
    packs = batches_of("text", sizes, config_of(sizes, layers), given)
    sides: dict[str, Run] = {
        name: partial(run_variant, variant, config_of(sizes, layers), packs, given)
        for name, variant in {"omnitrain": Variant(), **VARIANTS}.items()
    }
    for name in hf_experts(device):
        sides[f"hf_{name}"] = partial(run_theirs, name, config_of(sizes, layers), packs, given)
    found = dict(measured_one_by_one(device, sides))
    more = {"layers": float(layers), "tokens_per_pack": float(given.tokens), "loopback_steps": float(loopback or 0)}
    more |= {"loss_error": loss_error(list(found.values()))}
    failed = len(sides) - len(found) + (loopback is None)
    return _result(found, limit, more | {"failed_sides": float(failed)})


def _result(found: dict[str, Measured], limit: float, more: dict[str, float]) -> Result:
    speeds = {side: median(measured.tokens_per_second) for side, measured in found.items()}
    theirs = [side for side in found if side.startswith("hf_")]
    figures = {}
    if "omnitrain" in found:
        figures["share_of_ceiling"] = median(found["omnitrain"].operations_per_second) / limit
        if theirs:
            figures["ratio_over_hf"] = speeds["omnitrain"] / max(speeds[side] for side in theirs)
        figures |= {f"worth_{part}": speeds["omnitrain"] / speeds[part] for part in VARIANTS if part in speeds}
    for side, measured in found.items():
        figures[f"{side}_tokens_per_second"] = speeds[side]
        figures[f"{side}_tflop_per_second"] = median(measured.operations_per_second) / 1e12
        figures[f"{side}_peak_mib"] = measured.peak_mib
    figures |= {f"{side}_uses_liger": float(found[side].uses_liger) for side in theirs}
    rounds = {f"{side}_tokens_per_second": measured.tokens_per_second for side, measured in found.items()}
    return Result("gpu_moe", FORMULA, figures | {"ceiling_tflop_per_second": limit / 1e12, **more}, rounds)


def main() -> None:
    """Measure and report."""
    options = parser(sys.modules[__name__].__doc__ or "", rounds=5, steps=2)
    options.add_argument("--loopback", type=int, default=200, help="number of random steps of the expert exchange")
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")  # read when liger is imported
    ALL_EXPERTS_FUNCTIONS.register("grouped_mm_bf16", grouped_mm_in_bf16)
    given = start_on_device(options, 8192)
    report_all(measure(given), given)


if __name__ == "__main__":
    main()
