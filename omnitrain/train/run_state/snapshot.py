"""A rank's part of a checkpoint, and the function that writes it, in the process that trains or in another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omnitrain.checkpoint.model_files import ModelFiles, write_model, write_small
from omnitrain.checkpoint.optimizer import OptimizerState, write_optimizer
from omnitrain.checkpoint.pieces import Piece
from omnitrain.checkpoint.store import CheckpointStore
from omnitrain.peers import Peers, all_or_raise

OPTIMIZER = "optimizer"  # folder of the optimizer's state
EMA_FOLDER = "ema"  # of the averages of the weights


@dataclass(frozen=True)
class Snapshot:
    """A rank's part of a checkpoint: files of the model, pieces of its tensors, parts of the optimizer's state."""

    step: int  # optimizer steps done
    files: ModelFiles
    weights: Sequence[Piece]
    states: Mapping[str, OptimizerState]  # folder -> part of the state of the optimizer, or of the averages
    small: Mapping[str, bytes]  # path in the folder -> content, of all other files. Empty on all ranks but the first

    def on_host(self) -> Snapshot:
        """Return it with all tensors contiguous in the memory of the CPU; tensors there are not copied."""
        states = {folder: state.on_host() for folder, state in self.states.items()}
        return Snapshot(self.step, self.files, [piece.on_host() for piece in self.weights], states, self.small)


def write_snapshot(store: CheckpointStore, snapshot: Snapshot, peers: Peers) -> Path:
    """Write a checkpoint atomically, of tensors on the CPU, and return its folder. All ``peers`` call this."""

    def write(folder: Path) -> None:
        write_model(snapshot.files, snapshot.weights, folder, peers, previous=store.saved)
        for name, state in snapshot.states.items():
            write_optimizer(state, folder / name, peers)
        all_or_raise(peers, lambda: write_small(snapshot.small, folder))

    return store.save(snapshot.step, write, peers)
