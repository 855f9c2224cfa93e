"""Whole tensors of a model whose parameters are on several pipeline ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from omnitrain.parallel.pipeline.apply import Pipeline

_AT_ONCE = 16  # tensors in a message


def whole_over_stages(values: Mapping[str, Tensor | None], pipeline: Pipeline | None) -> dict[str, Tensor | None]:
    """Return whole tensors on the CPU, on all ranks. All ranks must call it.

    Args:
        values: parameter -> its value, its gradient, or None; the same names in the same order on all ranks. Values of
            parameters that only other stages hold are ignored.
        pipeline: the pipeline; None: every rank holds all parameters.
    """
    if pipeline is None:
        return {name: _whole(value) for name, value in values.items()}
    whole: dict[str, Tensor | None] = {}
    for source in sorted({pipeline.held_by[name][0] for name in values}):
        names = [name for name in values if pipeline.held_by[name][0] == source]
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            # A stage that holds them, too, must gather its shards with the others of its mesh.
            sent: list[Any] = [
                _whole(values[name]) if pipeline.stages.rank in pipeline.held_by[name] else None for name in some
            ]
            dist.broadcast_object_list(sent, group=pipeline.group, group_src=source)
            whole |= dict(zip(some, sent, strict=True))
    return {name: whole[name] for name in values}


def _whole(value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    whole: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().to("cpu", copy=True)
