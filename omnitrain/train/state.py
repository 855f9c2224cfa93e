"""What a checkpoint keeps of training, beside the model and its processor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from omnitrain.data.sample import Rejected
from omnitrain.data.slots import LoaderState, SlotState
from omnitrain.errors import UserError

_FILE = "trainer.pt"


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        seconds: spent so far, over all starts.
        steps_without_targets: steps in which nothing was to be predicted.
        data: where its data stand, over all ranks.
        rows: rows of each training data set.
    """

    step: int = 0
    seconds: float = 0.0
    steps_without_targets: int = 0
    data: LoaderState = field(default_factory=LoaderState)
    rows: tuple[int, ...] = ()


def write_state(
    folder: Path, state: TrainingState, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Write ``state``, the optimizer's and the random generators' into ``folder``."""
    saved = {
        "state": asdict(state),
        "trainable": _trainable(model),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }
    torch.save(saved, folder / _FILE)


def read_state(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> TrainingState:
    """The state that :func:`write_state` wrote; optimizer and random generators continue from theirs.

    Raises:
        UserError: other parameters train now, or in another order.
    """
    saved = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
    if saved["trainable"] != _trainable(model):
        changed = sorted(set(saved["trainable"]) ^ set(_trainable(model))) or "their order"
        raise UserError(f"{folder}: other parameters trained than those of this recipe: {changed}")
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    if device.type == "cuda" and saved["cuda_rng"] is not None:
        torch.cuda.set_rng_state(saved["cuda_rng"], device)
    return TrainingState(**(saved["state"] | {"data": _loader_state(**saved["state"]["data"])}))


def _loader_state(slots: dict[int, dict[str, Any]], rejected: tuple[dict[str, Any], ...]) -> LoaderState:
    return LoaderState(
        {slot: SlotState(**state) for slot, state in slots.items()}, tuple(Rejected(**row) for row in rejected)
    )


def _trainable(model: torch.nn.Module) -> list[str]:
    """Names of the trained parameters, in the order in which the optimizer's state lists them."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
