"""In which number format a run computes: of `train.precision`, the device, and the plans of its components."""

from __future__ import annotations

import torch

from omnitrain.recipe import ParallelPlan, Precision, Train
from omnitrain.recipe.parallel import FOUNDATION


def mixed_precision(settings: Train, device_type: str) -> bool | None:
    """What `train.precision` says to ``build_parallelize_model`` as ``enable_mixed_precision``.

    Args:
        settings: of the recipe.
        device_type: of the device that the run trains on, ``cuda`` or ``cpu``.

    Returns:
        True: bf16 over fp32 weights, but for components whose plan says otherwise. False: fp32, and no plan may say
        otherwise. None: fp32, but for components whose plan says otherwise.
    """
    if settings.precision == "auto":
        return True if device_type == "cuda" else None
    return settings.precision == "bf16"


def compute_dtype(plan: ParallelPlan, mixed: bool | None) -> torch.dtype:
    """In which the foundation computes; ``mixed``: see :func:`mixed_precision`."""
    own = plan.of(FOUNDATION).precision or Precision()
    return getattr(torch, own.compute or ("bfloat16" if mixed else own.param) or "float32")
