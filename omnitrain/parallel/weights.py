"""Putting a checkpoint's weights into a model that is built already, on the meta device or not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.errors import TrainingError, UserError
from omnitrain.models.hf import load_strictly
from omnitrain.models.lora import Adapters, adapters_of, add_lora
from omnitrain.models.lora_files import load_adapters, stored_adapters
from omnitrain.models.omni import OmniModel

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
    everywhere: list[dict[str, Adapters]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, adapters)
    for rank, found in enumerate(everywhere):
        if found != everywhere[0]:
            raise UserError(
                f"rank {rank} has other LoRA adapters than rank 0: found {_shown(found)}; expected "
                f"{_shown(everywhere[0])}; build the same model on every rank"
            )


def _shown(adapters: Mapping[str, Adapters]) -> str:
    return ", ".join(f"{name} ({own.summary})" for name, own in adapters.items()) or "none"


def require_weights(*, is_bare: bool) -> None:
    """A model that has its weights.

    Raises:
        UserError: ``is_bare``: it is on the meta device on the rank that should have them.
    """
    if is_bare:
        raise UserError(
            "the model is on the meta device on rank 0 and weights_path is not given; pass weights_path, or build the "
            "model with init_device='cpu' there"
        )


def require_equal_weights(model: nn.Module) -> None:
    """Before they are sharded, parameters are the same on all ranks.

    Raises:
        UserError: on all ranks, with the names of some that differ.
    """
    mine = {name: _fingerprint(parameter) for name, parameter in model.named_parameters()}
    everyone: list[dict[str, tuple[float, ...]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    different = sorted({name for other in everyone for name in mine if other.get(name) != everyone[0].get(name)})
    if different:
        raise UserError(
            f"{len(different)} parameters differ between ranks, such as {', '.join(different[:_SHOWN])}; build the "
            "model from the same weights, or with the same seed, on every rank"
        )


@torch.no_grad()
def _fingerprint(parameter: Tensor) -> tuple[float, ...]:
    """Sums that differ, but for a coincidence, where tensors do; comparable between ranks of equal machines."""
    total = parameter.sum(dtype=torch.float64)
    size = torch.linalg.vector_norm(parameter, 1, dtype=torch.float64)
    return (float(total), float(size), *map(float, parameter.shape))


def by_first(work: Callable[[], T]) -> T:
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
