"""Save and load the state of an optimizer. Each rank writes and reads its shards; nothing is gathered.

``torch.distributed.checkpoint`` defines the files. Tensors in them are named ``PARAMETER.KEY``
(``head.weight.exp_avg``) and have the shape of the whole parameter, so a run can continue under any layout.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from typing_extensions import override

from omnitrain.checkpoint.pieces import Piece, PieceOwners
from omnitrain.errors import UserError
from omnitrain.peers import Peers, all_or_raise, parameters_at_rest, ranks_of

T = TypeVar("T")

_MASTER = "master"
_INDEX = ".metadata"  # torch writes this last; without it no other file is read
_SHOWN = 3  # examples in an error message


@dataclass(frozen=True)
class OptimizerState:
    """The part of an optimizer's state that one rank writes: pieces and other values, all named ``PARAMETER.KEY``."""

    pieces: Sequence[Piece]
    values: Mapping[str, Any]

    def on_host(self) -> OptimizerState:
        """Return it with all pieces contiguous in the memory of the CPU; what is there is not copied."""
        return OptimizerState([piece.on_host() for piece in self.pieces], self.values)


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Save the state of ``optimizer``, without options, to ``folder``, the same on all its ranks, which call this.

    ``model``: sharded or not, whose parameter names are used. The state may hold numbers, text and tensors, sharded
    like their parameter except scalars. An earlier state is replaced. Raises UserError: the state holds something else,
    or parameters that are not the model's; OSError: writing failed. All ranks raise it.
    """
    parameters = parameters_at_rest(model)
    with _ranks_of(model) as peers:
        stored = optimizer_state(parameters, optimizer, PieceOwners(parameters, peers))
        write_optimizer(stored.on_host(), folder, peers)


def optimizer_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, owners: PieceOwners
) -> OptimizerState:
    """Return the part of an optimizer's state that this rank writes; ``parameters``, ``owners``: of the whole model."""
    names = _names(parameters, optimizer)
    state = optimizer.state_dict()
    states = state["state"]
    _require_storable(states, names, parameters, optimizer)
    keyed = [(names[index], key, value) for index, values in states.items() for key, value in values.items()]
    keyed += [(names[index], _MASTER, value) for index, value in state.get("masters", {}).items()]
    pieces, values = [], {}
    for number, (name, key, value) in enumerate(keyed):
        if not isinstance(value, Tensor):
            if owners.writes(name, parameters[name]):
                values[f"{name}.{key}"] = value
        elif (piece := owners.piece(f"{name}.{key}", value, number, parameters[name], name)) is not None:
            pieces.append(piece)
    return OptimizerState(pieces, values)


def write_optimizer(state: OptimizerState, folder: str | Path, peers: Peers) -> None:
    """Write what :func:`save_optimizer` writes, of pieces in the memory of the CPU. All ``peers`` call this."""
    _together(peers, lambda: (Path(folder) / _INDEX).unlink(missing_ok=True) if peers.rank == 0 else None)
    writer = dcp.FileSystemWriter(folder)
    writer.set_up_storage_writer(peers.rank == 0)
    planner = _Planner(state)
    local = _together(peers, lambda: writer.prepare_local_plan(planner.create_local_plan()))
    plans: list[Any] = peers.gather_on_first(local)
    metadata: Metadata | None = None
    if peers.rank == 0:  # it makes the index
        plans, metadata = create_default_global_save_plan(plans)
        plans = writer.prepare_global_plan(plans)
    plan = peers.swap(plans or [None] * peers.size)[0]
    written = _together(peers, lambda: writer.write_data(plan, planner).value())
    results = peers.gather_on_first(written)
    _together(peers, lambda: writer.finish(metadata, results) if metadata is not None else None)


class _Planner(dcp.DefaultSavePlanner):
    """Hands this rank's part of the state to torch's writer. The plan of all ranks is made without ``dcp.save``."""

    def __init__(self, state: OptimizerState) -> None:
        super().__init__()
        self._tensors = {(piece.place.name, piece.place.offsets): piece.tensor for piece in state.pieces}
        self._state = state

    @override
    def create_local_plan(self) -> SavePlan:
        items = []
        for place in (piece.place for piece in self._state.pieces):
            index = MetadataIndex(place.name, torch.Size(place.offsets))
            chunk = ChunkStorageMetadata(torch.Size(place.offsets), torch.Size(place.sizes))
            data = TensorWriteData(chunk, TensorProperties(dtype=place.dtype), torch.Size(place.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._state.values]
        return SavePlan(items)

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        values, offset = self._state.values, index.offset
        return values[index.fqn] if offset is None else self._tensors[index.fqn, tuple(offset)]


def _together(peers: Peers, work: Callable[[], T]) -> T:
    """Return the result of ``work``; if it raises on some ranks, raise the first of their exceptions on all ranks."""
    results: list[T] = []
    failure: Exception | None = None
    try:
        results.append(work())
    except Exception as error:  # raised below
        failure = error
    if not peers.any(failure is not None):
        return results[0]
    failures = [error for error in peers.gather(failure) if error is not None]
    raise failure or failures[0]


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Load what :func:`save_optimizer` saved, under any layout and precision. All ranks of the model call this.

    ``model``: with the same parameter names and shapes. Parameters that had an fp32 copy and are now fp32 get the
    values of that copy, because their saved weights were rounded. ``optimizer``: of the same class, with or without
    offload. Raises UserError, on all ranks: the folder has no state, or state of other parameters or shapes.
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


@torch.no_grad()
def load_averages(model: nn.Module, folder: str | Path) -> None:
    """Write the averages of ``AveragedWeights`` in ``folder`` over the weights of a model that is not sharded."""
    reader, parameters = dcp.FileSystemReader(folder), dict(model.named_parameters())
    with _ranks_of(model):
        for key, metadata in _stored(reader, folder, parameters).items():
            average = {key: _empty(parameters[_owner(key)], metadata)}
            dcp.load(average, storage_reader=reader, no_dist=True)
            parameters[_owner(key)].copy_(average[key])


def _owner(key: str) -> str:
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
