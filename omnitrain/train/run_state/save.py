"""Save a checkpoint of a run under any layout. Each rank writes its shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint.optimizer import save_optimizer
from omnitrain.checkpoint.store import write_metrics
from omnitrain.data.render.processor import OmniProcessor
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
    line: Mapping[str, Any] | None = None,
) -> None:
    """Write the checkpoint folder of ``state.step`` atomically. Every rank calls this.

    Args:
        run: folder of the run.
        ranks: ranks of the run.
        model: the model, sharded or not; adapters are written to separate files.
        processor: processor of the model.
        optimizer: optimizer of its trained parameters.
        state: state of the run. Only the first rank, which writes it, needs its data.
        line: the line of ``metrics.jsonl`` of that step. None: there is none.
    """

    def write(folder: Path) -> None:
        save_whole(model, folder, ranks.peers, previous=run.store.saved)
        save_optimizer(model, optimizer, folder / OPTIMIZER)
        ranks.first(lambda: write_on_first(folder))

    def write_on_first(folder: Path) -> None:
        processor.save_pretrained(folder)
        write_state(folder, state, trainable(model))
        if line is not None:
            write_metrics(folder, line)

    run.store.save(state.step, write, ranks.peers)
    ranks.first(lambda: run.list_rejected(state.data.rejected))


def checkpoint_bytes(model: torch.nn.Module) -> int:
    """Return the size of a checkpoint: weights, and two fp32 moments and an fp32 copy (if not fp32) of trained ones."""
    weights = set(model.state_dict(keep_vars=True).values())
    trained = [weight for weight in weights if weight.requires_grad]
    moments = sum(weight.numel() * (8 if weight.dtype == torch.float32 else 12) for weight in trained)
    return moments + sum(weight.numel() * weight.element_size() for weight in weights)
