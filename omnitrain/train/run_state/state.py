"""The training state in a checkpoint, in addition to the model and its processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from omnitrain.checkpoint.optimizer import load_optimizer
from omnitrain.data.loading.slots import LoaderState
from omnitrain.errors import UserError
from omnitrain.parallel.step.item_costs import UNUSED_STEPS

_FILE = "trainer.pt"
_SHOWN = 3


@dataclass(frozen=True)
class TrainingState:
    """The state of a run, from which it resumes.

    Attributes:
        expert_shares: layer with experts -> the experts' shares of the last step's tokens.
        quadratic_costs: component -> the quadratic part of its items' cost. None: it was not measured.
        section_seconds: component -> seconds of its work (:class:`Measured`). None: it was not measured.
        losses: head -> source -> sum of its losses and tokens, since the last line of metrics.
    """

    step: int = 0
    seconds: float = 0.0  # training time so far, over all starts
    steps_without_targets: int = 0
    data: LoaderState = field(default_factory=LoaderState)  # state of the data, over all ranks
    rows: tuple[int, ...] = ()  # rows of each training data set
    expert_shares: dict[str, list[float]] = field(default_factory=dict)
    expert_chunks: dict[str, int] | None = None  # component -> the fastest number of chunks. None: it was not measured
    quadratic_costs: dict[str, float] | None = None
    section_seconds: dict[str, float] | None = None
    measured_costs_unused_until: int = UNUSED_STEPS  # the last step that is planned without these two
    losses: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    mean_loss: float = 0.0  # mean total loss of the same steps, over ``loss_tokens`` predicted tokens of all heads
    loss_tokens: int = 0
    samples: int = 0


def write_state(folder: Path, state: TrainingState, trainable: Sequence[str]) -> None:
    """Write ``state`` and the names of the trained parameters to ``folder``, the folder of a checkpoint."""
    torch.save({"state": asdict(state), "trainable": list(trainable)}, folder / _FILE)


def read_state(folder: Path, model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> TrainingState:
    """Read what :func:`write_state` wrote, and load the state of each optimizer from its folder. All ranks call it.

    Raises UserError: the trained parameters are not those of the checkpoint.
    """
    saved = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
    if changed := sorted(set(saved["trainable"]) ^ set(trainable(model))):
        raise UserError(
            f"{folder}: this recipe trains other parameters than the run did; {len(changed)} differ, such as "
            f"{', '.join(changed[:_SHOWN])}; resume with the `freeze` and `lora` that the run was started with, or "
            "start a new run from its weights"
        )
    for name, optimizer in optimizers.items():
        load_optimizer(model, optimizer, folder / name)
    return TrainingState(**(saved["state"] | {"data": LoaderState.from_saved(saved["state"]["data"])}))


def trainable(model: torch.nn.Module) -> list[str]:
    """Return the names of the trained parameters."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
