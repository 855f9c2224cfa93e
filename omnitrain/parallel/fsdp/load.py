"""Putting a checkpoint's weights into a model that is built already, on the meta device or not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.errors import TrainingError, UserError
from omnitrain.models.adapters.files import load_adapters, stored_adapters
from omnitrain.models.adapters.lora import Adapters, adapters_of, add_lora
from omnitrain.models.hf.load import load_strictly
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.collectives import gathered_objects

T = TypeVar("T")

_SHOWN = 3


def load_weights(model: PreTrainedModel, path: str) -> None:
    """Fill ``model`` in place: all tensors of the checkpoint and of the model, or an error.

    A twin is loaded, and its tensors are taken over: buffers that no checkpoint has are those of a normal
    construction, tied weights are one parameter, and what is frozen stays frozen. LoRA adapters beside the checkpoint
    are put in, too, unless the model has them already.

    Args:
        model: on any device, ``meta`` too.
        path: folder or Hub id.

    Raises:
        UserError: no such folder, or no weights in it, or other adapters than the model's.
        WeightsError: names every missing, unexpected or misshapen tensor.
    """
    config = copy.deepcopy(model.config)
    config._attn_implementation = None  # the model has its own already
    twin = load_strictly(type(model), path, config=config)
    if isinstance(model, OmniModel):
        load_adapters(cast(OmniModel, twin), path)
        add_lora(model, adapters_at(path, model))
    taken: dict[nn.Parameter, nn.Parameter] = {}
    for name, source in twin.named_modules(remove_duplicate=False):
        target = model.get_submodule(name)
        for key, value in source._parameters.items():
            if value is not None:
                trains = target._parameters[key].requires_grad
                target._parameters[key] = taken.setdefault(value, nn.Parameter(value.data, requires_grad=trains))
        target._buffers.update(source._buffers)
        for key, value in vars(source).items():
            if isinstance(value, Tensor):  # a buffer in all but registration
                setattr(target, key, value)


def adapters_at(path: str, model: OmniModel) -> dict[str, Adapters]:
    """Component of ``model`` -> the LoRA adapters that a checkpoint has for it.

    Raises:
        UserError: the model has others already.
    """
    found, expected = stored_adapters(model, path), adapters_of(model)
    if expected and found != expected:
        raise UserError(
            f"the checkpoint at {path!r} has other LoRA adapters than the model: found {_shown(found)}; expected "
            f"{_shown(expected)}; build the model with weights_path of this checkpoint, or without adapters "
            "(config_path, on the meta device)"
        )
    return found


def require_same_adapters(adapters: dict[str, Adapters]) -> None:
    """What follows from adapters, refusals too, is then the same on all ranks, which all call this.

    Args:
        adapters: component -> those that it has, or gets with its weights.

    Raises:
        UserError: on all ranks, where one has others than rank 0.
    """
    everywhere = gathered_objects(adapters)
    for rank, found in enumerate(everywhere):
        if found != everywhere[0]:
            raise UserError(
                f"rank {rank} has other LoRA adapters than rank 0: found {_shown(found)}; expected "
                f"{_shown(everywhere[0])}; build the same model on every rank"
            )


def _shown(adapters: Mapping[str, Adapters]) -> str:
    return ", ".join(f"{name} ({own.summary})" for name, own in adapters.items()) or "none"


def require_one_source(model: OmniModel, path: str | None, *, is_bare: bool) -> None:
    """A model has its weights, or gets them.

    Args:
        model: with adapters or without.
        path: of the checkpoint, if any.
        is_bare: it is on the meta device on the rank that has them, or reads them.

    Raises:
        UserError: neither; or it has trained adapters, which the checkpoint would replace.
    """
    if path is None and is_bare:
        raise UserError(
            "the model is on the meta device on rank 0 and weights_path is not given; pass weights_path, or build the "
            "model with init_device='cpu' there"
        )
    if path is not None and adapters_of(model) and not is_bare:
        raise UserError(
            "the model has LoRA adapters and its weights, and weights_path would replace both; leave out weights_path, "
            "or build the model with init_device='meta'"
        )


def require_equal_weights(model: nn.Module) -> None:
    """Before they are sharded, parameters are the same on all ranks.

    Raises:
        UserError: on all ranks, with the names of some that differ.
    """
    _require_alike(
        {name: _fingerprint(parameter) for name, parameter in model.named_parameters()},
        "differ between ranks",
        "build the model from the same weights, or with the same seed, on every rank",
    )


def require_same_parameters(model: nn.Module) -> None:
    """Before rank 0 hands them out; all ranks call this.

    Raises:
        UserError: on all ranks, with the names of some that differ from those of rank 0: by name, shape or whether they
            train.
    """
    _require_alike(
        {name: (tuple(parameter.shape), parameter.requires_grad) for name, parameter in model.named_parameters()},
        "are not those of rank 0",
        "build the same model on every rank",
    )


def _require_alike(parameters: dict[str, Hashable], problem: str, advice: str) -> None:
    """By what is said of each; all ranks call this."""
    everywhere = gathered_objects(parameters)
    if different := sorted({name for found in everywhere for name, _ in found.items() ^ everywhere[0].items()}):
        raise UserError(f"{len(different)} parameters {problem}, such as {', '.join(different[:_SHOWN])}; {advice}")


@torch.no_grad()
def _fingerprint(parameter: Tensor) -> tuple[float, ...]:
    """Sums that differ, but for a coincidence, where tensors do; comparable between ranks of equal machines."""
    total = parameter.sum(dtype=torch.float64)
    size = torch.linalg.vector_norm(parameter, 1, dtype=torch.float64)
    return (float(total), float(size), *map(float, parameter.shape))


def rank0_first(work: Callable[[], T]) -> T:
    """Let the first rank do ``work``; no rank goes on before. All of them call this.

    Returns:
        What ``work`` returned, on all ranks; it must pickle.

    Raises:
        UserError: on all ranks, where the first one raised it.
        TrainingError: on the other ranks, where it raised something else; the first one raises that itself.
    """
    done: T | None = None
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            done = work()
        except Exception as error:  # raised again below, when the others know
            failed = error
    told = failed
    if failed is not None and not isinstance(failed, UserError):
        told = TrainingError(f"rank 0 failed: {type(failed).__name__}: {failed}")
    for_all = [told, done]
    dist.broadcast_object_list(for_all, src=0)
    if failed is not None:
        raise failed
    told, done = cast("tuple[Exception | None, T]", for_all)
    if told is not None:
        raise told
    return done
