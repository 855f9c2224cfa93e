"""Give a model's code the dtype in which it computes, where its weights are stored in another one.

FSDP casts parameters while their module runs. transformers' code counts on more, because there a model that computes in
bf16 is one that was built or loaded in bf16: its buffers are bf16, too, and so is ``model.dtype``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from omnitrain.models.discovery import config_nodes
from omnitrain.torch_private import BatchNorm, buffers_of, parameters_of
from omnitrain.transformers_private import fp32_modules_of, set_attention

_COMPUTE_DTYPE = "omnitrain_compute_dtype"
_stored_dtype: Any = PreTrainedModel.dtype
PreTrainedModel.dtype = property(lambda self: vars(self).get(_COMPUTE_DTYPE) or _stored_dtype.fget(self))


def stays_fp32(model: PreTrainedModel) -> Callable[[str], bool]:
    """Return a function of a parameter's name: whether transformers keeps it in fp32 at any precision."""
    names = sorted(fp32_modules_of(model))
    pattern = re.compile("|".join(rf"(^|\.)({name})($|\.)" for name in names) or r"(?!)")
    return lambda path: pattern.search(path) is not None


def compute_in(
    model: PreTrainedModel,
    dtypes: Mapping[nn.Parameter, torch.dtype | None],
    around: torch.dtype | None,
    stays_fp32: Callable[[str], bool],
) -> None:
    """Let a model compute in a dtype as transformers' model of this dtype does. FSDP, or the caller, casts parameters.

    Buffers that transformers builds in the dtype of the weights have it while their module runs. A batch norm computes
    in the dtype of its statistics, which in bf16 would lose most of their updates. ``dtype`` of each model is its
    compute dtype. ``dtypes``: parameter -> its compute dtype; None: its own; ``model`` is not sharded yet. ``around``:
    for modules with several dtypes, and those in them without parameters. ``stays_fp32``: name -> kept in fp32 by
    transformers.
    """
    if {*dtypes.values(), around} <= {None, torch.float32}:
        return
    of_weights = _buffers_in_the_dtype_of_weights(model)
    for path, module, dtype in _with_dtypes(model, "", dtypes, around):
        if isinstance(module, BatchNorm) and module.running_mean is not None:
            _cast_in_calls(module, parameters_of(module), ("weight", "bias"), module.running_mean.dtype)
        elif dtype is not None:
            buffers = (f"{path}{name}" for name, _ in module.named_buffers(recurse=False))
            names = [name.removeprefix(path) for name in buffers if name in of_weights and not stays_fp32(name)]
            _cast_in_calls(module, buffers_of(module), names, dtype)
            if isinstance(module, PreTrainedModel):
                setattr(module, _COMPUTE_DTYPE, dtype)


def _with_dtypes(
    module: nn.Module, path: str, dtypes: Mapping[nn.Parameter, torch.dtype | None], around: torch.dtype | None
) -> Iterator[tuple[str, nn.Module, torch.dtype | None]]:
    """Yield each module with the prefix of its names, and the dtype in which it computes."""
    of_parameters = {dtypes[parameter] for parameter in module.parameters() if parameter in dtypes}
    own = of_parameters.pop() if len(of_parameters) == 1 else around
    yield path, module, own
    for name, child in module.named_children():
        yield from _with_dtypes(child, f"{path}{name}.", dtypes, own)


def _buffers_in_the_dtype_of_weights(model: PreTrainedModel) -> set[str]:
    """Names of buffers that have a dim: others give no other tensor their dtype."""
    config = copy.deepcopy(model.config)
    for node in config_nodes(config):
        set_attention(node, "eager")  # ours has a name that makes transformers look for kernels
    with torch.device("meta"), local_torch_dtype(torch.bfloat16):
        built = type(model)(config)
    return {name for name, buffer in built.named_buffers() if buffer.dtype is torch.bfloat16 and buffer.ndim}


def _cast_in_calls(module: nn.Module, tensors: dict[str, Any], names: Collection[str], dtype: torch.dtype) -> None:
    """Cast tensors of a module while it runs. ``tensors``: its buffers or parameters."""
    kept: list[dict[str, Tensor]] = []  # the same of each call that runs: the backward of another may recompute inside

    def cast(*_: Any) -> None:
        kept.append(kept[0] if kept else {name: tensors[name] for name in names if tensors.get(name) is not None})
        tensors.update({name: tensor.to(dtype) for name, tensor in kept[0].items()})

    def restore(*_: Any) -> None:
        if len(kept) == 1:
            tensors.update(kept[0])
        del kept[-1:]

    if names:
        module.register_forward_pre_hook(cast)
        module.register_forward_hook(restore, always_call=True)
