"""Save and load the state of an optimizer. Each rank writes and reads its shards.

The files are those of ``torch.distributed.checkpoint``. Tensors in them are named ``PARAMETER.KEY``
(``head.weight.exp_avg``) and have the shape of the whole parameter, so a run can continue under any layout. Nothing is
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
_INDEX = ".metadata"  # torch writes this last; without it no other file is read
_SHOWN = 3  # examples in an error message


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Save the state of ``optimizer``. Parameters that never had a gradient have none.

    All ranks of the model call this.

    Args:
        model: the model, sharded or not, whose parameter names are used.
        optimizer: an optimizer of some of its parameters. Its state may hold numbers, text and tensors; tensors of a
            sharded parameter must be sharded like it, except scalars. Options of its groups are not saved.
        folder: the same on all ranks; created if missing. An earlier state in it is removed first and replaced.

    Raises:
        UserError: the state holds something else, or the optimizer has parameters that are not the model's.
        OSError: writing failed. This and any other error of writing is raised on all ranks.
    """
    parameters = parameters_at_rest(model)
    names = _names(parameters, optimizer)
    state = optimizer.state_dict()
    states = state["state"]
    _require_storable(states, names, parameters, optimizer)
    tensors = {f"{names[index]}.{key}": value for index, values in states.items() for key, value in values.items()}
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
    """Load the state that :func:`save_optimizer` saved, under any layout and precision.

    All ranks of the model call this.

    Args:
        model: a model with the same parameter names and shapes as the saved one. Parameters that had an fp32 copy and
            are now fp32 get the values of that copy, because their saved weights were rounded.
        optimizer: an optimizer of the same class, with or without offload.
        folder: the same on all ranks.

    Raises:
        UserError: raised on all ranks if the folder has no state, or has state of parameters that are not the
            optimizer's or have another shape.
    """
    reader = dcp.FileSystemReader(folder)
    parameters = parameters_at_rest(model)
    names = _names(parameters, optimizer)
    with _ranks_of(model) as peers:
        stored = all_or_raise(peers, lambda: _stored(reader, folder, {name: parameters[name] for name in names}))
        values: dict[str, Any] = {
            key: _empty(parameters[_owner(key)], metadata)
            for key, metadata in stored.items()
            if not parameters[_owner(key)].is_meta  # another pipeline stage holds it
        }
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
    """Return the parameter name of a stored key."""
    return key.rpartition(".")[0]


def _names(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of its state dict."""
    names = {parameter: name for name, parameter in parameters.items()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := [parameter for parameter in trained if parameter not in names]:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in foreign[:_SHOWN])
        raise UserError(
            f"the optimizer has {len(foreign)} parameters that are not the model's, with shapes such as {shapes}; make "
            "it from model.parameters(), after the model is sharded (build_parallelize_model, fully_shard)"
        )
    return [names[parameter] for parameter in trained]


def _require_storable(
    states: Mapping[Any, Mapping[str, Any]],
    names: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Raise, before anything is written, if the state could not be loaded again."""
    problems = [f"{index}, which is not a parameter" for index in states if not isinstance(index, int)]
    for index, values in states.items():
        if isinstance(index, int):
            name = names[index]
            by_key = {key: _problem(key, value, parameters[name]) for key, value in values.items()}
            problems += [f"{name}.{key}, {problem}" for key, problem in by_key.items() if problem]
    if problems:
        raise UserError(
            f"the state of {type(optimizer).__name__} cannot be saved: found {'; '.join(problems[:_SHOWN])} "
            f"({len(problems)} in total); expected numbers, and tensors that are sharded like their parameter; use "
            "another optimizer, or save its state_dict() with torch.save, one file per rank, and load it under the "
            "same layout"
        )


def _problem(key: str, value: Any, parameter: nn.Parameter) -> str | None:
    """Return why a value of a parameter's state cannot be stored, or None."""
    if "." in key or key == _MASTER:
        return "a name that is reserved in the files"
    if not isinstance(value, Tensor):
        return None if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
    if isinstance(value, DTensor) != isinstance(parameter, DTensor) and value.numel() > 1:
        return f"a {type(value).__name__} of {tuple(value.shape)} for a {type(parameter.data).__name__}"
    if isinstance(value, DTensor) and value.shape != parameter.shape:
        return f"a tensor of {tuple(value.shape)} for a sharded parameter of {tuple(parameter.shape)}"
    return None


def _stored(
    reader: dcp.FileSystemReader, folder: str | Path, parameters: Mapping[str, nn.Parameter]
) -> dict[str, STORAGE_TYPES]:
    """Return key -> metadata of the stored values. Raise if a value does not fit ``parameters``."""
    try:
        stored = reader.read_metadata().state_dict_metadata
    except FileNotFoundError:
        raise UserError(f"no optimizer state in {folder}; expected a folder that save_optimizer wrote") from None
    if unknown := sorted({_owner(key) for key in stored}.difference(parameters)):
        raise UserError(
            f"{folder} has the state of {len(unknown)} parameters that the optimizer does not have, such as "
            f"{', '.join(unknown[:_SHOWN])}; make the optimizer from the same parameters as when it was saved"
        )
    misfits = {key: metadata for key, metadata in stored.items() if not _fits(metadata, parameters[_owner(key)])}
    if misfits:
        shown = [
            f"{key} {tuple(metadata.size)} for {tuple(parameters[_owner(key)].shape)}"
            for key, metadata in list(misfits.items())[:_SHOWN]
            if isinstance(metadata, TensorStorageMetadata)
        ]
        raise UserError(
            f"{folder} has {len(misfits)} tensors that do not fit their parameters, such as {', '.join(shown)}; load "
            "it for a model with the same shapes; factored state (Adafactor) loads only for unsharded parameters"
        )
    return stored


def _fits(stored: STORAGE_TYPES, parameter: nn.Parameter) -> bool:
    """Whether it is a number, a tensor of the parameter's shape, or of some of its dims (Adafactor's factors)."""
    if not isinstance(stored, TensorStorageMetadata) or stored.size.numel() == 1 or stored.size == parameter.shape:
        return True
    return not isinstance(parameter, DTensor) and set(stored.size) <= {*parameter.shape, 1}


def _empty(parameter: nn.Parameter, stored: STORAGE_TYPES) -> Any:
    """Return an empty tensor in host memory; the optimizer moves it to the device of its state."""
    if not isinstance(stored, TensorStorageMetadata):  # a number, which needs no buffer
        return None
    if stored.size != parameter.shape:
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    return torch.empty_like(parameter, dtype=stored.properties.dtype, device="cpu", requires_grad=False)


@contextlib.contextmanager
def _ranks_of(model: nn.Module) -> Iterator[Peers]:
    """Raise an error of one rank on all ranks, and silence torch's warning about a single process."""
    try:
        with ranks_of(model) as peers, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield peers
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise failure from error
