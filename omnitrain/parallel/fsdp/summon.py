"""Sharded models used outside of their forward: all weights but those of blocks gathered for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp import FSDPModule

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.fsdp.units import blocks_of


@contextmanager
def gathered(model: OmniModel) -> Iterator[None]:
    """While open, embeddings, heads, norms and whole decoders are there on every rank, and may be used at any time.

    Every rank enters it at the same point. Inside, only blocks of the foundation and of encoders gather their weights
    when they are called, and drop them afterwards: every rank must call each of them equally often. All else is free of
    collectives. Decoders are gathered with their blocks, because ranks draw and decode media at different times.
    On leaving, also by an error, all weights are sharded again.

    Args:
        model: sharded or not; nothing happens to one that is not.
    """
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FSDPModule)}
    blocks = {
        name for component, found in blocks_of(model).items() if component not in model.decoder_names for name in found
    }
    kept = [unit for name, unit in units.items() if name not in blocks]
    groups = [group for group in map(_parameter_group, kept) if group is not None]
    before = [group.post_forward_mesh_info for group in groups]
    try:
        for unit in kept:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    except BaseException:
        if hasattr(model, "reset_iter_state"):  # since torch 2.13: ends a forward that was cut short
            model.reset_iter_state()
        raise
    finally:
        for group, info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = info
        for unit in units.values():
            unit.reshard()


def _parameter_group(unit: FSDPModule) -> Any:
    """What holds whether a unit is sharded again after its forward; torch has a setter for that and no getter."""
    return unit._get_fsdp_state()._fsdp_param_group
