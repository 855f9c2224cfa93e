"""The state of an optimizer in a folder, of which each rank writes and reads the parts that it has.

The files are those of ``torch.distributed.checkpoint``. In them, tensors are called ``PARAMETER.KEY``
(``head.weight.exp_avg``) and have the shape of the whole parameter, so a run goes on under any layout. Nothing is
gathered.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from omnitrain.errors import UserError
from omnitrain.peers import Peers, ranks_of

_MASTER = "master"
_SHOWN = 3


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Write what ``optimizer`` knows of each parameter: nothing of one that never had a gradient.

    Args:
        model: whose parameters have the names; sharded or not.
        optimizer: of some of them. Options of its groups are not written.
        folder: the same on all ranks of the model, which all call this; it need not be there.

    Raises:
        OSError: and what else writing raises, on all ranks.
    """
    names = _names(model, optimizer)
    state = optimizer.state_dict()
    tensors = {f"{names[index]}.{key}": value for index, own in state["state"].items() for key, value in own.items()}
    tensors |= {f"{names[index]}.{_MASTER}": value for index, value in state.get("masters", {}).items()}
    with _ranks_of(model) as peers:
        dcp.save(
            tensors,
            storage_writer=dcp.FileSystemWriter(folder),
            process_group=peers.group,
            no_dist=peers.group is None,
        )


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Continue from what :func:`save_optimizer` wrote, under any layout and precision.

    Args:
        model: with the parameters of the model of then, by name and shape. Those that had an fp32 copy, and are fp32
            now, get the values of the copy: their own were rounded when they were saved.
        optimizer: of the same class, with or without offload.
        folder: the same on all ranks of the model, which all call this.

    Raises:
        UserError: no state there, or that of parameters that are not the optimizer's.
    """
    reader = dcp.FileSystemReader(folder)
    indices = {name: index for index, name in enumerate(_names(model, optimizer))}
    parameters = dict(model.named_parameters())
    stored = _metadata(reader, folder).state_dict_metadata
    owner = {key: key.rpartition(".")[0] for key in stored}
    _require_known(set(owner.values()), indices, folder)
    values: dict[str, Any] = {key: _empty(parameters[owner[key]], about) for key, about in stored.items()}
    with _ranks_of(model) as peers:
        dcp.load(values, storage_reader=reader, process_group=peers.group, no_dist=peers.group is None)
    states: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    for key, value in values.items():
        name, field = owner[key], key.rpartition(".")[2]
        if field != _MASTER:
            states.setdefault(indices[name], {})[field] = value
        elif parameters[name].dtype == value.dtype:
            parameters[name].detach().copy_(value)
        else:
            masters[indices[name]] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups, "masters": masters})


def _metadata(reader: dcp.FileSystemReader, folder: str | Path) -> Metadata:
    try:
        return reader.read_metadata()
    except FileNotFoundError:
        raise UserError(f"no state of an optimizer in {folder}; name the folder that save_optimizer wrote") from None


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Of the optimizer's parameters, in the order of its state dict."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _require_known(found: set[str], expected: Collection[str], folder: str | Path) -> None:
    if unknown := sorted(found.difference(expected)):
        raise UserError(
            f"{folder} has the state of {len(unknown)} parameters that the optimizer does not have, such as "
            f"{', '.join(unknown[:_SHOWN])}; give it those that it had when it was saved"
        )


def _empty(parameter: nn.Parameter, stored: Any) -> Any:
    """In host memory: the optimizer moves it to where its state is."""
    if not isinstance(stored, TensorStorageMetadata):  # a number; it has no place before it is read
        return None
    if stored.size != parameter.shape:  # a number of steps
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    return torch.empty_like(parameter, dtype=stored.properties.dtype, device="cpu", requires_grad=False)


@contextlib.contextmanager
def _ranks_of(model: nn.Module) -> Iterator[Peers]:
    """What a rank's part raises, all raise; a process alone is no reason to warn."""
    try:
        with ranks_of(model) as peers, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield peers
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise failure from error
