"""Choose the dtypes of a run from `train.precision`, the device, and the plans of its components."""

from __future__ import annotations

import torch

from omnitrain.recipe import ParallelPlan, Precision, Train
from omnitrain.recipe.parallel import FOUNDATION


def mixed_precision(settings: Train, device_type: str) -> bool | None:
    """Return the ``enable_mixed_precision`` of ``build_parallelize_model`` that `train.precision` means on a device.

    True: bf16 compute with fp32 weights, unless a component's plan differs. False: fp32, and no plan may differ.
    None: fp32, unless a component's plan differs.
    """
    if settings.precision == "auto":
        return True if device_type == "cuda" else None
    return settings.precision == "bf16"


def compute_dtype(plan: ParallelPlan, mixed: bool | None) -> torch.dtype:
    """Return the dtype in which the foundation computes; ``mixed``: see :func:`mixed_precision`."""
    precision = plan.of(FOUNDATION).precision or Precision()
    return getattr(torch, precision.compute or ("bfloat16" if mixed else precision.param) or "float32")
