"""The state of an optimizer in a folder, of which each rank writes and reads the parts that it has.

The files are those of ``torch.distributed.checkpoint``. Their names are ``PARAMETER.KEY``, as ``head.weight.exp_avg``.
Tensors have the shape of the whole parameter, so a run goes on under any layout. Nothing is gathered.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from omnitrain.peers import ALONE, Peers

_MASTER = "master"


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, peers: Peers = ALONE) -> None:
    """Write what ``optimizer`` knows of each parameter: nothing of one that never had a gradient.

    Args:
        model: whose parameters have the names; sharded or not.
        optimizer: of some of them. Options of its groups are not written.
        folder: the same on all ranks; it need not be there.
        peers: all ranks of the model, which all call this.

    Raises:
        OSError: and what else writing raises, on all ranks.
    """
    names = _names(model, optimizer)
    state = optimizer.state_dict()
    tensors = {f"{names[index]}.{key}": value for index, own in state["state"].items() for key, value in own.items()}
    tensors |= {f"{names[index]}.{_MASTER}": value for index, value in state.get("masters", {}).items()}
    with _as_one_process(peers):
        dcp.save(
            tensors,
            storage_writer=dcp.FileSystemWriter(folder),
            process_group=peers.group,
            no_dist=peers.group is None,
        )


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, peers: Peers = ALONE) -> None:
    """Continue from what :func:`save_optimizer` wrote, under any layout.

    Args:
        model: with the parameters of the model of then, by name and shape.
        optimizer: of the same class, with or without offload.
        folder: the same on all ranks.
        peers: all ranks of the model, which all call this.
    """
    reader = dcp.FileSystemReader(folder)
    indices = {name: index for index, name in enumerate(_names(model, optimizer))}
    parameters = dict(model.named_parameters())
    tensors: dict[str, Any] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        name = key.rpartition(".")[0]
        assert isinstance(stored, TensorStorageMetadata)
        if name in indices:
            tensors[key] = _empty(parameters[name], stored)
    with _as_one_process(peers):
        dcp.load(tensors, storage_reader=reader, process_group=peers.group, no_dist=peers.group is None)
    states: dict[int, dict[str, Tensor]] = {}
    masters: dict[int, Tensor] = {}
    for key, tensor in tensors.items():
        name, _, field = key.rpartition(".")
        if field == _MASTER:
            masters[indices[name]] = tensor
        else:
            states.setdefault(indices[name], {})[field] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups, "masters": masters})


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Of the optimizer's parameters, in the order of its state dict."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _empty(parameter: nn.Parameter, stored: TensorStorageMetadata) -> Tensor:
    """In host memory: the optimizer moves it to where its state is."""
    if stored.size != parameter.shape:  # a number of steps
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    return torch.empty_like(parameter, dtype=stored.properties.dtype, device="cpu", requires_grad=False)


@contextlib.contextmanager
def _as_one_process(peers: Peers) -> Iterator[None]:
    """What a rank's part raises, all raise; a process alone is no reason to warn."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise failure from error
