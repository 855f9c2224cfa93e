"""Training speed on one GPU: omnitrain against HF ``Trainer`` on the same samples.

Two random models with the widths of Qwen3-4B and Qwen3-VL-4B. State is fp32 (weights, gradients, Adam), computation
bf16, nothing is recomputed. The depth of the language model is ``--layers``, by default as many layers as fit in the
free memory on the hungriest side (HF without liger, which keeps all logits); all sides have the same. Samples are text
and pictures of this repository (``repo_samples.py``), prepared before anything is timed:

- ``text``: documentation and source code, every token predicted;
- ``mixed``: the same, every other sample behind a mosaic of handwritten digits.

Sides, one after the other, because two models do not fit at once:

- ``omnitrain``: packs of ``--tokens`` tokens, the step of ``Trainer``, blocks compiled on a GPU;
- ``hf_flattened`` (text): HF ``Trainer`` with ``DataCollatorWithFlattening``, on just these packs;
- ``hf_padded``: HF ``Trainer``, samples sorted by length, padded to at most ``--tokens`` tokens with padding.

HF runs in bf16 by autocast, with liger's kernels and flash attention where these packages are installed (and liger's
fit transformers'), sdpa where not. It neither logs nor saves. A round is ``--steps`` optimizer steps; the device is
synchronised at its ends only. A side has as many rounds as ``--seconds`` allow, at least one and at most ``--rounds``.
Our sides come first: liger changes transformers' modules for the whole process.

How operations and the ceiling are counted says ``gpu_operations.py``.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from statistics import median

from gpu_batches import batches_of, flattened, padded, padded_batches
from gpu_harness import Measured, Run, loss_error, measured_one_by_one, report_all, start_on_device
from gpu_operations import ceiling
from gpu_sides import can_use, foundation_plan, run_hf, run_omnitrain
from gpu_sizes import FULL, TINY, config_of, layers_that_fit
from harness import Result, parser

FORMULA = (
    "share_of_ceiling = operations of a round / seconds / ceiling (operations as in gpu_operations.py); "
    "ratio_over_hf = omnitrain / best HF side, in tokens without padding per second; medians over rounds"
)
HF_SIDES = {"text": ("hf_flattened", "hf_padded"), "mixed": ("hf_padded",)}


def measure(given: Namespace) -> Result:
    """Measure both kinds of data and all sides."""
    sizes = TINY if given.tiny else FULL
    limit = ceiling(sizes.matmul, given.device)
    layers = {kind: given.layers or layers_that_fit(kind, sizes, given) for kind in HF_SIDES}
    configs = {kind: config_of(kind, sizes, number) for kind, number in layers.items()}
    packs = {kind: batches_of(kind, sizes, config, given) for kind, config in configs.items()}
    sides: dict[tuple[str, str], Run] = {
        (kind, "omnitrain"): partial(run_omnitrain, config, packs[kind], given, foundation_plan(given))
        for kind, config in configs.items()
    }
    for kind, side in ((kind, side) for kind, sides_of_hf in HF_SIDES.items() for side in sides_of_hf):
        collate, batches = flattened, packs[kind]
        if side == "hf_padded":
            collate, batches = padded, padded_batches(packs[kind], given.tokens)
        sides[kind, side] = partial(run_hf, collate, configs[kind], batches, given)
    found = dict(measured_one_by_one(given.device, sides))
    figures = {f"{kind}_layers": float(number) for kind, number in layers.items()}
    same_packs = [found[side] for side in (("text", "omnitrain"), ("text", "hf_flattened")) if side in found]
    figures |= {"loss_error": loss_error(same_packs)}
    figures |= {"hf_uses_flash_attn": float(can_use("flash_attn", given.device))}
    figures |= {"tokens_per_pack": float(given.tokens), "failed_sides": float(len(sides) - len(found))}
    return _result(found, limit, figures)


def _result(found: dict[tuple[str, str], Measured], limit: float, more: dict[str, float]) -> Result:
    figures = {}
    for kind in HF_SIDES:
        sides = {side: measured for (of, side), measured in found.items() if of == kind}
        if (ours := sides.pop("omnitrain", None)) is None:
            continue
        figures[f"{kind}_share_of_ceiling"] = median(ours.operations_per_second) / limit
        if sides:
            best = max(median(measured.tokens_per_second) for measured in sides.values())
            figures[f"{kind}_ratio_over_hf"] = median(ours.tokens_per_second) / best
    for (kind, side), measured in found.items():
        figures[f"{kind}_{side}_tokens_per_second"] = median(measured.tokens_per_second)
        figures[f"{kind}_{side}_tflop_per_second"] = median(measured.operations_per_second) / 1e12
        figures[f"{kind}_{side}_peak_mib"] = measured.peak_mib
        if side != "omnitrain":
            figures[f"{kind}_{side}_uses_liger"] = float(measured.uses_liger)
    figures |= {"ceiling_tflop_per_second": limit / 1e12, **more}
    rounds = {f"{kind}_{side}_tokens_per_second": m.tokens_per_second for (kind, side), m in found.items()}
    return Result("gpu_train", FORMULA, figures, rounds)


def main() -> None:
    """Measure and report."""
    given = start_on_device(parser(sys.modules[__name__].__doc__ or "", rounds=7, steps=2), FULL.longest * 2)
    report_all(measure(given), given)


if __name__ == "__main__":
    main()
