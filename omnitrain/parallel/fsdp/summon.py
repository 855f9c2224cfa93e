"""Use a sharded model outside of training: gather all weights except those of blocks temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.fsdp import FSDPModule

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.fsdp.units import blocks_of
from omnitrain.torch_private import parameter_groups, reset_after_error


@contextmanager
def gathered(model: OmniModel) -> Iterator[None]:
    """Gather embeddings, heads, norms and complete decoders on every rank while the context is open.

    All ranks must enter together. Inside, only blocks of the foundation and of encoders gather their weights for each
    call, so all ranks must call each of these blocks equally often; nothing else issues collectives. Decoders are
    gathered with their blocks, because ranks generate and decode media at different times. On exit, also after an
    error, all weights are sharded again. Without FSDP the context does nothing.
    """
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FSDPModule)}
    blocks = {
        name for component, names in blocks_of(model).items() if component not in model.decoder_names for name in names
    }
    summoned = [unit for name, unit in units.items() if name not in blocks]
    # torch has a setter for resharding after the forward, but no getter; the parameter group has the state.
    groups = [group for unit in summoned for group in parameter_groups(unit)]
    before = [group.post_forward_mesh_info for group in groups]
    try:
        for unit in summoned:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    except BaseException:
        reset_after_error(model)
        raise
    finally:
        for group, info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = info
        for unit in units.values():
            unit.reshard()
