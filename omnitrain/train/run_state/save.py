"""A checkpoint of a run, whatever its layout: each rank writes a part of it."""

from __future__ import annotations

from pathlib import Path

import torch

from omnitrain.checkpoint.optimizer import save_optimizer
from omnitrain.data.processor import OmniProcessor
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.save import save_whole
from omnitrain.train.process_groups import Ranks
from omnitrain.train.run_state.run_folder import RunFolder
from omnitrain.train.run_state.state import OPTIMIZER, TrainingState, trainable, write_state


def save_checkpoint(
    run: RunFolder,
    ranks: Ranks,
    model: OmniModel,
    processor: OmniProcessor,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
) -> None:
    """Write ``state.step``'s folder, which is complete or not there at all. Every rank calls it.

    Args:
        run: where to.
        ranks: all of the run.
        model: sharded or not; adapters go into files of their own.
        processor: of the model.
        optimizer: of its trained parameters.
        state: where the run stands, the same on all ranks.
    """

    def write(folder: Path) -> None:
        save_whole(model, folder, ranks.peers)
        save_optimizer(model, optimizer, folder / OPTIMIZER)
        ranks.first(lambda: beside(folder))

    def beside(folder: Path) -> None:
        processor.save_pretrained(folder)
        write_state(folder, state, trainable(model))

    run.store.save(state.step, write, ranks.peers)
    ranks.first(lambda: run.list_rejected(state.data.rejected))


def checkpoint_bytes(model: torch.nn.Module) -> int:
    """Of a checkpoint: weights, and of what trains two moments in fp32, and a copy in fp32 where it is not fp32."""
    weights = set(model.state_dict(keep_vars=True).values())
    trained = [weight for weight in weights if weight.requires_grad]
    moments = sum(weight.numel() * (8 if weight.dtype == torch.float32 else 12) for weight in trained)
    return moments + sum(weight.numel() * weight.element_size() for weight in weights)
