"""Load the weights of a checkpoint into an existing model, on the meta device or not."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import nullcontext
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnitrain.errors import TrainingError, UserError
from omnitrain.models.adapters.files import load_adapters, stored_adapters
from omnitrain.models.adapters.lora import Adapters, adapters_of, add_lora
from omnitrain.models.hf.load import load_strictly
from omnitrain.models.hf.stored_tensor import weights_left_in_files
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.collectives import gathered_objects
from omnitrain.torch_private import buffers_of, parameters_of
from omnitrain.transformers_private import set_attention_of_all

T = TypeVar("T")

_SHOWN = 3


def load_weights(model: PreTrainedModel, path: str, *, in_files: bool = False) -> None:
    """Load all tensors of a checkpoint into ``model``, in place.

    This loads a second model and takes its tensors, so buffers that are in no checkpoint get the values of a normal
    construction. Tied weights stay one parameter, and frozen parameters stay frozen. LoRA adapters of the checkpoint
    are added, unless the model has them already. ``in_files``: leave what is in safetensors files there, as
    ``StoredTensor``. Raises UserError: no folder or weights, or other adapters than the model's; WeightsError: names
    every missing, unexpected or misshapen tensor.
    """
    config = copy.deepcopy(model.config)
    set_attention_of_all(config, None)  # the model has chosen its attention already
    with weights_left_in_files() if in_files else nullcontext():
        loaded = load_strictly(type(model), path, config=config)
    if isinstance(model, OmniModel):
        load_adapters(cast(OmniModel, loaded), path)
        add_lora(model, adapters_at(path, model))
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for name, source in loaded.named_modules(remove_duplicate=False):
        target = model.get_submodule(name)
        for key, value in parameters_of(source).items():
            if value is not None:
                trains = parameters_of(target)[key].requires_grad
                parameters_of(target)[key] = copies.setdefault(value, nn.Parameter(value.data, requires_grad=trains))
        buffers_of(target).update(buffers_of(source))
        for key, value in vars(source).items():
            if isinstance(value, Tensor):  # a buffer that the module keeps as a plain attribute
                setattr(target, key, value)


def adapters_at(path: str, model: OmniModel) -> dict[str, Adapters]:
    """Return component -> its LoRA adapters in the checkpoint at ``path``; other ones in the model are a UserError."""
    stored, expected = stored_adapters(model, path), adapters_of(model)
    if expected and stored != expected:
        raise UserError(
            f"the checkpoint at {path!r} has other LoRA adapters than the model: found {_shown(stored)}; expected "
            f"{_shown(expected)}; build the model with weights_path of this checkpoint, or without adapters "
            "(config_path, on the meta device)"
        )
    return stored


def require_same_adapters(adapters: dict[str, Adapters]) -> None:
    """Raise UserError on all ranks, which must call this, if one has, or will load, other adapters than rank 0."""
    by_rank = gathered_objects(adapters)
    for rank, of_rank in enumerate(by_rank):
        if of_rank != by_rank[0]:
            raise UserError(
                f"rank {rank} has other LoRA adapters than rank 0: found {_shown(of_rank)}; expected "
                f"{_shown(by_rank[0])}; build the same model on every rank"
            )


def _shown(adapters: Mapping[str, Adapters]) -> str:
    return ", ".join(f"{name} ({of_component.summary})" for name, of_component in adapters.items()) or "none"


def require_one_source(model: OmniModel, path: str | None, *, is_bare: bool) -> None:
    """Raise UserError unless weights are in the model (not if it ``is_bare``), or else in a checkpoint at ``path``."""
    if path is None and is_bare:
        raise UserError(
            "the model on rank 0 is on the meta device, but weights_path is not set; pass weights_path, or build the "
            "model with init_device='cpu' on rank 0 (with sections: on the first rank of each)"
        )
    if path is not None and adapters_of(model) and not is_bare:
        raise UserError(
            "the model already has weights and LoRA adapters, and weights_path would replace both; omit weights_path, "
            "or build the model with init_device='meta'"
        )


def require_equal_weights(model: nn.Module) -> None:
    """Require equal parameters on all ranks before sharding, else a UserError on all; all ranks must call this."""
    _require_equal(
        {name: _fingerprint(parameter) for name, parameter in model.named_parameters()},
        "differ between ranks",
        "build the model from the same weights, or with the same seed, on every rank",
    )


def require_same_parameters(model: nn.Module) -> None:
    """Raise UserError on all ranks, which must call this, if parameters' names, shapes or flags differ."""
    _require_equal(
        {name: (tuple(parameter.shape), parameter.requires_grad) for name, parameter in model.named_parameters()},
        "differ from rank 0",
        "build the same model on every rank",
    )


def _require_equal(parameters: dict[str, Hashable], problem: str, advice: str) -> None:
    """Compare name -> description between ranks by digests, then in full; all ranks must call this."""
    digest = hashlib.blake2b(repr(sorted(parameters.items())).encode(), digest_size=16).digest()
    if len(set(gathered_objects(digest))) == 1:
        return
    by_rank = gathered_objects(parameters)
    if different := sorted({name for of_rank in by_rank for name, _ in of_rank.items() ^ by_rank[0].items()}):
        raise UserError(f"{len(different)} parameters {problem}, such as {', '.join(different[:_SHOWN])}; {advice}")


@torch.no_grad()
def _fingerprint(parameter: Tensor) -> tuple[float, ...]:
    """Sums that almost certainly differ if tensors differ; comparable between ranks on equal machines."""
    total = parameter.sum(dtype=torch.float64)
    size = torch.linalg.vector_norm(parameter, 1, dtype=torch.float64)
    return (float(total), float(size), *map(float, parameter.shape))


def first_ranks(work: Callable[[], T], ranks: Collection[int] = (0,)) -> T:
    """Return, on all ranks, the picklable result of ``work`` on some global ranks; all ranks must call this.

    ``work`` must return the same on these ranks, such as the first rank of each section. Its UserError is raised on all
    ranks, another error as TrainingError on the others.
    """
    result: T | None = None
    failed: Exception | None = None
    if dist.get_rank() in ranks:
        try:
            result = work()
        except Exception as error:  # raised below, after the others know
            failed = error
    reported = failed
    if failed is not None and not isinstance(failed, UserError):
        reported = TrainingError(f"rank {dist.get_rank()} failed: {type(failed).__name__}: {failed}")
    of_all = gathered_objects((reported, result))
    if failed is not None:
        raise failed
    for reported, _ in of_all:
        if reported is not None:
            raise reported
    return cast(T, of_all[min(ranks)][1])
