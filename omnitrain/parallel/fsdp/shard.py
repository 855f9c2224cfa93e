"""Apply FSDP2, HSDP or replication to an omni model: one root, units per component, gradients summed over ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from omnitrain import torch_private
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.fsdp.units import ComponentUnits, ignored_params
from omnitrain.recipe.parallel import FOUNDATION
from omnitrain.torch_private import initialise_root, tree_map_only
from omnitrain.transformers_private import keep_recordable_outputs

# Methods of a component -> whether FSDP casts floating-point tensors of their first argument, features or hidden
# states. A decoder's media tokenizer keeps its precision, so the features for it are not cast; nor are labels.
_ENCODER_CALLS = {"lm_encode": True}
_TEACHER_CALLS = {"lm_states": False}  # its arguments are ids and flags
_DECODER_CALLS = {"lm_encode": False, "lm_head": True, "lm_embed": True}
_RUN_UNSHARDED = "run_unsharded"


@dataclass(frozen=True)
class Sharding:
    """The sharding of a component's parameters."""

    # one axis: shard over it (FSDP2). Two axes: replicate over the first, shard over the second (HSDP)
    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None = None  # the same for experts under expert parallelism; None: no such experts
    # dtype of parameters and activations in forward and backward; None: the dtype of the parameters
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = torch.float32  # dtype of gradient sums across ranks
    keep_unsharded: bool = False  # keep parameters gathered from forward to backward (more memory, less communication)
    offload: bool = False  # keep parameters and gradients in host memory

    def of_unit(self, name: str, units: ComponentUnits) -> Sharding:
        """Return the sharding of one of a component's units, such as experts, which have a mesh of their own."""
        inner = replace(self, compute_dtype=torch.float32) if name in units.fp32 else self
        if name not in units.experts:
            return inner
        assert self.expert_mesh is not None
        return replace(inner, mesh=self.expert_mesh)


def shard(
    model: OmniModel,
    units: Mapping[str, ComponentUnits],
    how: Mapping[str, Sharding],
    fill: Callable[[nn.Module], None] | None,
    absent: Collection[str] = (),
    root: str = FOUNDATION,
) -> None:
    """Shard every component's units over its mesh, in place; the model is the only root.

    FSDP sums gradients over all ranks of a mesh and does not divide them, because losses are already divided by the
    token count of the global batch. This also initialises the root, so that components may run before its first
    forward. ``fill`` replaces parameters on the meta device by their weights: of each unit before it is sharded, and of
    the model at the end. ``absent`` parameters, of other pipeline stages or sections, stay on the meta device, and so
    do units that have no others. The root's own parameters take the sharding of the component ``root``.
    """
    # No caller writes to the foundation's output, a view in most models.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    elsewhere = {parameter for name, parameter in model.named_parameters() if name in absent}
    fixed, attached = ignored_params(model) - elsewhere, {*model.encoder_names, *model.decoder_names}
    ignored = fixed | elsewhere
    for component, of_component in sorted(units.items(), key=lambda item: item[0] == FOUNDATION):  # inner units first
        for name in of_component.all:
            module = model.get_submodule(name)
            if fill is not None:
                fill(module)
            if component not in how or elsewhere.issuperset(module.parameters()):
                continue
            inner = how[component].of_unit(name, of_component)
            _shard_unit(
                module,
                inner,
                ignored,
                # A module that stays fp32 casts its inputs itself, and its outputs back to their dtype.
                casts_inputs=name in of_component.rest and name not in {FOUNDATION, *attached, *of_component.fp32},
                keeps_unsharded=name == FOUNDATION,  # its backward starts right after its forward ends
            )
            if name in attached:
                dtype = inner.compute_dtype or next(p.dtype for p in module.parameters() if p not in ignored)
                _gather_in_methods(model, component, dtype)
    if fill is not None:
        fill(model)
    root_unit = _shard_unit(model, how[root], ignored, casts_inputs=False, keeps_unsharded=True)
    model.compute_device = device_of(how[root].mesh)
    for parameter in fixed:
        parameter.data = parameter.data.to(model.compute_device)
    _require_embedding_grad(model)
    initialise_root(root_unit)


def _shard_unit(
    module: nn.Module, how: Sharding, ignored: set[nn.Parameter], *, casts_inputs: bool, keeps_unsharded: bool
) -> fsdp.FSDPModule:
    """Shard one unit. Inputs of blocks are not cast, so rotary tables stay fp32 as in transformers."""
    on_device = how.mesh.device_type != "cpu"
    unit = fsdp.fully_shard(
        module,
        mesh=how.mesh,
        mp_policy=fsdp.MixedPrecisionPolicy(
            param_dtype=how.compute_dtype, reduce_dtype=how.reduce_dtype, cast_forward_inputs=casts_inputs
        ),
        offload_policy=fsdp.CPUOffloadPolicy(pin_memory=on_device) if how.offload else fsdp.OffloadPolicy(),
        reshard_after_forward=not (how.keep_unsharded or keeps_unsharded),
        ignored_params=ignored,
    )
    unit.set_force_sum_reduction_for_comms(True)
    if how.mesh.size() > 1:
        unit.set_gradient_divide_factor(1.0)
    elif not how.offload:  # with one rank FSDP divides only if a factor is set, and copies all gradients to do so
        skip_copy_in_out(unit)
    if isinstance(module, PreTrainedModel):
        # FSDP renames the class of a unit. transformers looks up by class name which outputs a model can record, so
        # towers whose intermediate layers are used (LLaVA) would return none.
        keep_recordable_outputs(module)
    return unit


def _gather_in_methods(model: OmniModel, component: str, dtype: torch.dtype) -> None:
    """Gather an attached component's parameters whenever one of its methods is called.

    The FSDP method takes a closure without tensors, so the component reduces only once per micro-batch, at its end:
    its methods use different parameters, and ranks without media call them with other inputs.
    """

    def run(function: Callable[[], Any]) -> Any:
        return function()

    module: Any = model.get_submodule(component)
    of_media = _ENCODER_CALLS if component in model.encoder_names else _DECODER_CALLS
    calls = _TEACHER_CALLS if component in model.teachers else of_media
    setattr(module, _RUN_UNSHARDED, run)
    fsdp.register_fsdp_forward_method(module, _RUN_UNSHARDED)
    for method, casts in calls.items():
        setattr(module, method, partial(_call, module, getattr(module, method), dtype if casts else None))


def _call(module: Any, method: Callable[..., Any], dtype: torch.dtype | None, first: Any, *others: Any) -> Any:
    """Call the method, with floating-point tensors of its first argument cast to ``dtype``; None: unchanged."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if dtype is not None:
        first = tree_map_only(Tensor, cast, first)
    return getattr(module, _RUN_UNSHARDED)(lambda: method(first, *others))


def _require_embedding_grad(model: OmniModel) -> None:
    """Let ranks without media run the same backward (and collectives of blocks) with frozen embeddings, too."""

    def with_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled() or output.requires_grad:
            return None
        return output.detach().requires_grad_().clone()

    model.foundation.get_input_embeddings().register_forward_hook(with_gradient)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device for tensors on ``mesh``."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def skip_copy_in_out(unit: FSDPModule) -> None:
    """Avoid torch's copies in a unit just returned by ``fully_shard``, on a mesh of one rank, without CPU offload.

    torch casts the parameters, then copies them into the all-gather output; it packs the gradients into one buffer,
    then copies it into the reduce-scatter output. Here the cast writes directly into the output, and both buffers are
    the same. This saves 12 of the 24 bytes that a unit moves per parameter in a forward and backward.
    """
    for group in torch_private.parameter_groups(unit):
        unit.set_custom_reduce_scatter(_SharedBuffer())
        for parameter in group.fsdp_params:
            parameter.__class__ = _CastIntoOutput


class _CastIntoOutput(torch_private.FSDPParam):
    """Allocate the all-gather output in the compute dtype, so that torch's copy into it casts."""

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        """``[n]`` in the stored dtype; torch's version has the compute dtype."""
        stored = torch_private.stored_shard(self)
        self.init_all_gather_outputs([stored.numel()], [self.param_dtype or stored.dtype], 1, stored.device)
        return [stored]


class _SharedBuffer(torch_private.DefaultReduceScatter):
    """Use one buffer as input and output of a reduce-scatter on one rank."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the input buffer on the second call of torch's ``foreach_reduce``, which allocates its output."""
        allocated = torch_private.input_of_reduce_scatter(sys._getframe(1))
        if allocated is None:
            return super().allocate(size, dtype=dtype, device=device)
        if allocated.is_cuda:
            allocated.record_stream(torch.cuda.current_stream(device))
        return allocated
