"""Whole tensors of a model whose parameters are on several pipeline ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from omnitrain.parallel.pipeline.apply import Pipeline


def whole_over_stages(values: Mapping[str, Tensor | None], pipeline: Pipeline | None) -> dict[str, Tensor | None]:
    """Return whole tensors on the CPU, on all ranks. All ranks must call it.

    Args:
        values: parameter -> it, its gradient, or None; the same names in the same order on all ranks. What only other
            stages hold may be anything.
        pipeline: the pipeline; None: every rank holds all.
    """
    whole: dict[str, Tensor | None] = {}
    for name, value in values.items():
        holders = (0,) if pipeline is None else pipeline.held_by[name]
        tensor = None
        if pipeline is None or pipeline.stages.rank in holders:
            tensor = _whole(value)
        if pipeline is not None:
            sent = [tensor]
            dist.broadcast_object_list(sent, group=pipeline.group, group_src=holders[0])
            tensor = sent[0]
        whole[name] = tensor
    return whole


def _whole(value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    whole: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().cpu().clone(memory_format=torch.preserve_format)
