"""FSDP2, HSDP and plain replication of an omni model: one root, units per component, gradients that are sums."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.fsdp.single_rank import skip_copy_in_out
from omnitrain.parallel.fsdp.units import ComponentUnits, ignored_params
from omnitrain.recipe.parallel import FOUNDATION

# How the trainer calls a component, and whether floats among the arguments are cast: a decoder's features are for its
# media tokenizer, which keeps its own precision.
_ENCODER_CALLS = {"lm_encode": True}
_DECODER_CALLS = {"lm_encode": False, "lm_head": True, "lm_embed": True}
_RUN = "run_unsharded"


@dataclass(frozen=True)
class Sharding:
    """How the parameters of a component lie on a mesh.

    Attributes:
        mesh: one dimension: shards over it (FSDP2); two: replicates over the first, shards over the second (HSDP).
        expert_mesh: the same for experts that are spread over ranks; None: there are none.
        compute_dtype: of parameters and activations in forward and backward; None: that of the parameters.
        reduce_dtype: in which gradients are added across ranks.
        keep_unsharded: keep gathered parameters from forward to backward (more memory, less communication).
        offload: parameters and gradients live in host memory.
    """

    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None = None
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = torch.float32
    keep_unsharded: bool = False
    offload: bool = False


def shard(
    model: OmniModel,
    units: Mapping[str, ComponentUnits],
    how: Mapping[str, Sharding],
    fill: Callable[[nn.Module], None] | None,
) -> None:
    """Shard every component's units over its own mesh, in place; the model is the only root.

    Gradients are added over all ranks of a mesh and divided by nothing: losses are divided by the count of the whole
    global batch before. The root is initialised here, so that its components may run before its first forward.

    Args:
        model: its parameters equal on all ranks.
        units: of each component.
        how: of each component; the root's own parameters lie as the foundation's.
        fill: called with each unit before it is sharded, and with the model at last: what is on the meta device is not
            behind it. None: nothing is there.
    """
    # What the foundation returns (hidden states, a view in most models) is written to by nobody.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    whole = ignored_params(model)
    for component, found in sorted(units.items(), key=lambda item: item[0] == FOUNDATION):  # inner units first
        for name in found.all:
            inner = how[component]
            if name in found.fp32:
                inner = replace(inner, compute_dtype=torch.float32)
            if name in found.experts:
                assert inner.expert_mesh is not None
                inner = replace(inner, mesh=inner.expert_mesh)
            is_attached = name == component and component != FOUNDATION
            if fill is not None:
                fill(model.get_submodule(name))
            _unit(
                model.get_submodule(name),
                inner,
                whole,
                casts_inputs=name in found.fp32 or (name in found.rest and name != FOUNDATION and not is_attached),
                keeps_unsharded=name == FOUNDATION,  # its backward begins with what its forward ended with
            )
            if is_attached:
                _call_as_one(model, component, inner.compute_dtype or _dtype(model.get_submodule(name), whole))
    if fill is not None:
        fill(model)
    root = _unit(model, how[FOUNDATION], whole, casts_inputs=False, keeps_unsharded=True)
    model.compute_device = device_of(how[FOUNDATION].mesh)
    for parameter in whole:
        parameter.data = parameter.data.to(model.compute_device)
    _give_gradients_a_way(model)
    initialise_root(root)


def initialise_root(root: FSDPModule) -> None:
    """What FSDP would do at the root's first forward; a component that ran before would take itself for the root.

    torch (2.11 to 2.13) offers no public call for it.
    """
    root._get_fsdp_state()._lazy_init()


def _unit(
    module: nn.Module, how: Sharding, whole: set[nn.Parameter], *, casts_inputs: bool, keeps_unsharded: bool
) -> FSDPModule:
    """One unit. Blocks take their inputs as the modules before them made them: rotary tables stay fp32, as in HF."""
    on_device = how.mesh.device_type != "cpu"
    unit = fully_shard(
        module,
        mesh=how.mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=how.compute_dtype, reduce_dtype=how.reduce_dtype, cast_forward_inputs=casts_inputs
        ),
        offload_policy=CPUOffloadPolicy(pin_memory=on_device) if how.offload else OffloadPolicy(),
        reshard_after_forward=not (how.keep_unsharded or keeps_unsharded),
        ignored_params=whole,
    )
    unit.set_force_sum_reduction_for_comms(True)
    if how.mesh.size() > 1:
        unit.set_gradient_divide_factor(1.0)
    elif not how.offload:  # a rank alone divides by nothing, unless it is told to: then in a copy of all gradients
        skip_copy_in_out(unit)
    if isinstance(module, PreTrainedModel):
        # FSDP gives a unit a class of another name, under which transformers looks up what a model can record: towers
        # of which intermediate layers are taken (LLaVA's) would return none.
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(module)), module._can_record_outputs)
    return unit


def _dtype(module: nn.Module, whole: set[nn.Parameter]) -> torch.dtype:
    """In which a unit computes that gathers its parameters as they are; what calls it may compute in another."""
    return next(parameter.dtype for parameter in module.parameters() if parameter not in whole)


def _call_as_one(model: OmniModel, component: str, dtype: torch.dtype) -> None:
    """Gather an attached component's parameters whenever one of its methods is called.

    FSDP sees no tensor among the arguments, so the component reduces once per micro-batch, at its end: its methods
    use different parameters, and ranks that have nothing to encode call them with other inputs.
    """
    module: Any = model.get_submodule(component)
    calls = _ENCODER_CALLS if component in model.encoder_names else _DECODER_CALLS
    setattr(module, _RUN, _run)
    register_fsdp_forward_method(module, _RUN)
    for method, casts in calls.items():
        setattr(module, method, partial(_call, module, getattr(module, method), dtype if casts else None))


def _run(function: Callable[[], Any]) -> Any:
    return function()


def _call(module: Any, method: Callable[..., Any], dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    """The method, with floats among its arguments in ``dtype``; None: as they are."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if dtype is not None:
        args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
    return getattr(module, _RUN)(lambda: method(*args, **kwargs))


def _give_gradients_a_way(model: OmniModel) -> None:
    """Where embeddings are frozen, only a rank with media would have a gradient at the foundation's blocks.

    All ranks must run the same backward: its units gather, and reduce, in the order of that.
    """

    def with_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled() or output.requires_grad:
            return None
        return output.detach().requires_grad_().clone()

    model.foundation.get_input_embeddings().register_forward_hook(with_gradient)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank has what lies on ``mesh``."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
