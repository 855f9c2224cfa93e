"""What a checkpoint keeps of training, beside the model and its processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint.optimizer import load_optimizer
from omnitrain.data.sample import Rejected
from omnitrain.data.slots import LoaderState, SlotState
from omnitrain.errors import UserError

_FILE = "trainer.pt"
_SHOWN = 3
OPTIMIZER = "optimizer"  # folder of its state


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        seconds: spent so far, over all starts.
        steps_without_targets: steps in which nothing was to be predicted.
        data: where its data stand, over all ranks.
        rows: rows of each training data set.
        expert_shares: layer with experts -> their shares of the last step's tokens.
        expert_chunks: component -> the number that was found to be fastest; None: nothing was measured.
        losses: head -> source -> sum of its losses and tokens, since the last line of metrics.
    """

    step: int = 0
    seconds: float = 0.0
    steps_without_targets: int = 0
    data: LoaderState = field(default_factory=LoaderState)
    rows: tuple[int, ...] = ()
    expert_shares: dict[str, list[float]] = field(default_factory=dict)
    expert_chunks: dict[str, int] | None = None
    losses: dict[str, dict[str, list[float]]] = field(default_factory=dict)


def write_state(folder: Path, state: TrainingState, trainable: Sequence[str]) -> None:
    """Write ``state`` into ``folder``, that of a checkpoint, with the names of the trained parameters."""
    torch.save({"state": asdict(state), "trainable": list(trainable)}, folder / _FILE)


def read_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
    """The state that :func:`write_state` wrote; the optimizer continues from its own, under any layout.

    Args:
        folder: of the checkpoint, with the optimizer's state in ``optimizer``.
        model: what goes on training; all its ranks call this.
        optimizer: of it.

    Raises:
        UserError: other parameters train now.
    """
    saved = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
    if changed := sorted(set(saved["trainable"]) ^ set(trainable(model))):
        raise UserError(
            f"{folder}: other parameters trained than those of this recipe, {len(changed)} in all, such as "
            f"{', '.join(changed[:_SHOWN])}; go on with the `freeze` and `lora` that the run was begun with, or start "
            "another run from its weights"
        )
    load_optimizer(model, optimizer, folder / OPTIMIZER)
    return TrainingState(**(saved["state"] | {"data": _loader_state(**saved["state"]["data"])}))


def _loader_state(slots: dict[int, dict[str, Any]], rejected: tuple[dict[str, Any], ...]) -> LoaderState:
    return LoaderState(
        {slot: SlotState(**state) for slot, state in slots.items()}, tuple(Rejected(**row) for row in rejected)
    )


def trainable(model: torch.nn.Module) -> list[str]:
    """Names of the trained parameters."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
