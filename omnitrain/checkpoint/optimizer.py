"""The state of an optimizer in a folder, of which each rank writes and reads the parts that it has.

The files are those of ``torch.distributed.checkpoint``. In them, tensors are called ``PARAMETER.KEY``
(``head.weight.exp_avg``) and have the shape of the whole parameter, so a run goes on under any layout. Nothing is
gathered.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from omnitrain.errors import UserError
from omnitrain.peers import Peers, all_or_raise, parameters_at_rest, ranks_of

_MASTER = "master"
_INDEX = ".metadata"  # written last, by torch; without it no other file is read
_SHOWN = 3


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Write what ``optimizer`` knows of each parameter: nothing of one that never had a gradient.

    Args:
        model: whose parameters have the names; sharded or not.
        optimizer: of some of them. It may keep numbers, text and tensors of each, but of a sharded one no other tensors
            than its parts have. Options of its groups are not written.
        folder: the same on all ranks of the model, which all call this; it need not be there. An earlier state in it
            is replaced, and none is there before the new one is complete.

    Raises:
        UserError: the optimizer keeps something else, or has parameters that are not the model's.
        OSError: and what else writing raises, on all ranks.
    """
    parameters = parameters_at_rest(model)
    names = _names(parameters, optimizer)
    state = optimizer.state_dict()
    _require_storable(state["state"], names, parameters, optimizer)
    tensors = {f"{names[index]}.{key}": value for index, own in state["state"].items() for key, value in own.items()}
    tensors |= {f"{names[index]}.{_MASTER}": value for index, value in state.get("masters", {}).items()}
    with _ranks_of(model) as peers:
        all_or_raise(peers, lambda: (Path(folder) / _INDEX).unlink(missing_ok=True) if peers.rank == 0 else None)
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
        UserError: on all ranks: no state there, or that of parameters that are not the optimizer's, or had another
            shape.
    """
    reader = dcp.FileSystemReader(folder)
    parameters = parameters_at_rest(model)
    names = _names(parameters, optimizer)
    with _ranks_of(model) as peers:
        stored = all_or_raise(peers, lambda: _stored(reader, folder, {name: parameters[name] for name in names}))
        values: dict[str, Any] = {key: _empty(parameters[_owner(key)], about) for key, about in stored.items()}
        dcp.load(values, storage_reader=reader, process_group=peers.group, no_dist=peers.group is None)
    states: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    indices = {name: index for index, name in enumerate(names)}
    for key, value in values.items():
        name, field = _owner(key), key.rpartition(".")[2]
        if field != _MASTER:
            states.setdefault(indices[name], {})[field] = value
        elif parameters[name].dtype == value.dtype:
            parameters[name].detach().copy_(value)
        else:
            masters[indices[name]] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups, "masters": masters})


def _owner(key: str) -> str:
    """The parameter of a stored tensor."""
    return key.rpartition(".")[0]


def _names(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> list[str]:
    """Of the optimizer's parameters, in the order of its state dict."""
    names = {parameter: name for name, parameter in parameters.items()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := [parameter for parameter in trained if parameter not in names]:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in foreign[:_SHOWN])
        raise UserError(
            f"the optimizer has {len(foreign)} parameters that are not the model's, of shapes such as {shapes}; make "
            "it of model.parameters(), and behind the layout of the model (build_parallelize_model, fully_shard)"
        )
    return [names[parameter] for parameter in trained]


def _require_storable(
    states: Mapping[Any, Mapping[str, Any]],
    names: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """What could not be read again is refused before it is written."""
    problems = [f"{index} beside the parameters" for index in states if not isinstance(index, int)]
    for index, own in states.items():
        if isinstance(index, int):
            name = names[index]
            found = {key: _problem(key, value, parameters[name]) for key, value in own.items()}
            problems += [f"{name}.{key}, {problem}" for key, problem in found.items() if problem]
    if problems:
        raise UserError(
            f"the state of {type(optimizer).__name__} cannot be saved: found {'; '.join(problems[:_SHOWN])} "
            f"({len(problems)} in all); expected numbers, and tensors that lie on the ranks as their parameter does; "
            "use another optimizer, or write its state_dict() with torch.save, a file per rank, for the same layout"
        )


def _problem(key: str, value: Any, parameter: nn.Parameter) -> str | None:
    """Why a value of a parameter's state would be lost or mistaken; None: it would not."""
    if "." in key or key == _MASTER:
        return "a name that stands for something else in the files"
    if not isinstance(value, Tensor):
        return None if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
    if isinstance(value, DTensor) != isinstance(parameter, DTensor) and value.numel() > 1:
        return f"a {type(value).__name__} of {tuple(value.shape)} for a {type(parameter.data).__name__}"
    if isinstance(value, DTensor) and value.shape != parameter.shape:
        return f"a tensor of {tuple(value.shape)} for one of {tuple(parameter.shape)} that is sharded"
    return None


def _stored(
    reader: dcp.FileSystemReader, folder: str | Path, parameters: Mapping[str, nn.Parameter]
) -> dict[str, STORAGE_TYPES]:
    """Key -> what is stored there; all of it is of ``parameters``."""
    try:
        stored = reader.read_metadata().state_dict_metadata
    except FileNotFoundError:
        raise UserError(f"no state of an optimizer in {folder}; name the folder that save_optimizer wrote") from None
    if unknown := sorted({_owner(key) for key in stored}.difference(parameters)):
        raise UserError(
            f"{folder} has the state of {len(unknown)} parameters that the optimizer does not have, such as "
            f"{', '.join(unknown[:_SHOWN])}; give it those that it had when it was saved"
        )
    other = {key: about for key, about in stored.items() if not _fits(about, parameters[_owner(key)])}
    if other:
        shown = [
            f"{key} {tuple(about.size)} for {tuple(parameters[_owner(key)].shape)}"
            for key, about in list(other.items())[:_SHOWN]
            if isinstance(about, TensorStorageMetadata)
        ]
        raise UserError(
            f"{folder} has {len(other)} tensors that do not fit their parameters, such as {', '.join(shown)}; load it "
            "for a model of the shapes of then, and factors of a parameter where that is not sharded"
        )
    return stored


def _fits(stored: STORAGE_TYPES, parameter: nn.Parameter) -> bool:
    """Whether it may be of the parameter: a number, a tensor of its shape, or of some of its dims (Adafactor's)."""
    if not isinstance(stored, TensorStorageMetadata) or stored.size.numel() == 1 or stored.size == parameter.shape:
        return True
    return not isinstance(parameter, DTensor) and set(stored.size) <= {*parameter.shape, 1}


def _empty(parameter: nn.Parameter, stored: STORAGE_TYPES) -> Any:
    """In host memory: the optimizer moves it to where its state is."""
    if not isinstance(stored, TensorStorageMetadata):  # a number; it has no place before it is read
        return None
    if stored.size != parameter.shape:
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
