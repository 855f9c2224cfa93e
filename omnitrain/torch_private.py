"""Every private name of torch that omnitrain uses: what it is for, and its spelling in each version of the window.

No other file uses one, and a test names those that the installed torch lacks (``tests/test_private_names.py``). A name
without a remark is the same in torch 2.11 to 2.15. :data:`omnitrain.packages.WINDOW` has the versions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import _utils as torch_utils
from torch import overrides
from torch._subclasses import fake_tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common, _fsdp_param
from torch.distributed.tensor import DTensor, _dtensor_spec, placement_types
from torch.distributed.tensor import _utils as tensor_utils
from torch.nn.modules import batchnorm, dropout
from torch.testing._internal.distributed import fake_pg
from torch.utils import _python_dispatch, _pytree

# Tensors in nested containers.
tree_any = _pytree.tree_any
tree_iter = _pytree.tree_iter
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only

# Models on tensors without content, and the errors of operations that need it.
FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
NEED_CONTENT = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)

# To see every operation that runs, its schema aside; tensors of a class of ours, and a context without that class.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
# The innermost mode that sees functions, or None; a context without it.
innermost_function_mode = overrides._get_current_function_mode
without_innermost_function_mode = overrides._pop_mode_temporarily

# A process group of ranks that are not there, for a layout that is tried in one process; a group by its name.
FakeStore = fake_pg.FakeStore
group_of_name = dist.distributed_c10d._resolve_process_group

# Base classes, to know batch norms and dropouts of any kind.
BatchNorm = batchnorm._BatchNorm
Dropout = dropout._DropoutNd

# The id of the backward that runs in this thread, or -1; whether a profiler records, so that a range may cost nothing.
current_graph_task_id = torch._C._current_graph_task_id
profiler_enabled = torch.autograd._profiler_enabled

# An error on the device, for which the host does not wait.
assert_async = torch._assert_async

# One kernel, or one collective, for many tensors.
copy_each = torch._foreach_copy_
multiply_each = torch._foreach_mul_
norm_of_each = torch._foreach_norm
flatten_dense_tensors = torch_utils._flatten_dense_tensors
unflatten_dense_tensors = torch_utils._unflatten_dense_tensors

# Public, but since torch 2.13 under these names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Attention that also returns the log-sum-exp, and its backward from that; the gradient of a softmax from its result.
cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention = torch.ops.aten._flash_attention_forward
flash_attention_backward = torch.ops.aten._flash_attention_backward
softmax_backward = torch._softmax_backward_data

# Operations that are known when they run: of experts, of tensors in files, of the profiler, and collectives.
ALL_TO_ALL = torch.ops.c10d.alltoall_base_
ARANGE = torch.ops.aten.arange
GROUPED_MM = torch.ops.aten._grouped_mm
TO_COPY = torch.ops.aten._to_copy.default
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
PROFILER_RECORDS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
COLLECTIVES = ("c10d", "_c10d_functional")

# Which part of a parameter a rank has; two mesh dims that shard one dim, the inner one first; a DTensor whose values
# are on another device than its mesh; the logger that warns of a redistribution in two steps.
part_of_rank = tensor_utils.compute_local_shape_and_global_offset
StridedShard = placement_types._StridedShard
DTensorSpec = _dtensor_spec.DTensorSpec
TensorMeta = _dtensor_spec.TensorMeta
REDISTRIBUTE_LOGGER = "torch.distributed.tensor._redistribute"

# Units on one rank: a reduce-scatter and parameters that copy less. Whether a forward recomputes inside a backward.
DefaultReduceScatter = _fsdp_collectives.DefaultReduceScatter
FSDPParam = _fsdp_param.FSDPParam
is_backward = _fsdp_common.is_bw


# Of an operation (an overload), its schema, and the operation with all its overloads. Of a tensor, how often it was
# written to in place. Of a module, what it holds itself, to replace it: parameters (also by tensors that are none),
# buffers, the names of those that are not in its state dict, children; and what `Module.compile` made of its call, or
# None. Of a parameter of a unit, the flat shard ``[n]`` in its stored dtype.
schema_of, packet_of = attrgetter("_schema"), attrgetter("_overloadpacket")
version_of = attrgetter("_version")
parameters_of, buffers_of = attrgetter("_parameters"), attrgetter("_buffers")
unsaved_buffers_of, children_of = attrgetter("_non_persistent_buffers_set"), attrgetter("_modules")
compiled_call = attrgetter("_compiled_call_impl")
stored_shard = attrgetter("_sharded_param_data")
key_of_storage = attrgetter("_cdata")  # a number that is the storage's alone while it lives


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that all tensors of one storage share; the storage of a DTensor itself is empty."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return key_of_storage(local.untyped_storage())


def has_hooks(module: torch.nn.Module, *, backward: bool = True) -> bool:
    """Whether something is called before or after a module's forward or, with ``backward``, its backward."""
    of_backward = (*module._backward_pre_hooks, *module._backward_hooks) if backward else ()
    return bool(module._forward_pre_hooks or module._forward_hooks or of_backward)


def set_compiled_call(module: torch.nn.Module, call: Any) -> None:
    """Change what :func:`compiled_call` returns."""
    vars(module)["_compiled_call_impl"] = call


def dynamo_backend(name: str) -> Callable[..., Any]:
    """Return a backend of torch.compile by its name."""
    return torch._dynamo.lookup_backend(name)


def dynamo_config() -> Any:
    """Return the settings of torch.compile; since torch 2.13 each thread has its own."""
    return torch._dynamo.config


def compile_id() -> Any:
    """Return the id of the compilation that runs; None: none does."""
    return torch._guards.CompileContext.current_compile_id()


def find_cpp_compiler() -> str:
    """Return the C++ compiler of inductor; it raises if there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def has_triton() -> bool:
    """Whether triton and a device for it are there."""
    from torch.utils._triton import has_triton

    return has_triton()


class AdamW(torch.optim.AdamW):
    """torch's AdamW, whose lists of tensors of a group can be changed by :meth:`init_group`."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        return self.init_group(group, *lists)

    def init_group(self, group: dict[str, Any], /, *lists: Any) -> bool:
        """Fill ``lists`` with the parameters of a group, their gradients and states; return whether one is complex."""
        return bool(super()._init_group(group, *lists))


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups of this rank."""
    return list(dist.distributed_c10d._world.pg_map)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of collectives of a group; None: its backends have none of their own."""
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    return next((backend.options._timeout for backend in backends if backend.options is not None), None)


def set_timeout_of_options(options: Any, timeout: timedelta) -> None:
    """Change the timeout of collectives of a group that will be made with these options."""
    options._timeout = timeout


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change the timeout of collectives of a group."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def set_default_timeout(group: Any, timeout: timedelta) -> None:
    """Change the timeout of collectives of a group that ``torch.distributed`` does not know."""
    group._set_default_timeout(timeout)


def begun_collectives(group: dist.ProcessGroup) -> dict[str, int]:
    """Return the number of collectives started on each device type of a group; torch counts them on the host."""
    begun = {}
    for device in group._device_types:
        with suppress(RuntimeError):  # the backend does not count
            backend: Any = group._get_backend(device)
            begun[device.type] = backend._get_sequence_number_for_group()
    return begun


def forget_meshes() -> None:
    """Clear torch's caches that keep device meshes, and so process groups."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._collective_utils import MeshTopoInfo

    forget_shardings()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()


def forget_shardings() -> None:
    """Clear DTensor's cache of operations in this thread."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """Return the groups of parameters of an FSDP unit; none if other units have all its parameters."""
    return _groups_of(unit._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # since torch 2.13
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]


def initialise_root(root: FSDPModule) -> None:
    """Initialise FSDP's root before its first forward; otherwise the first component to run would become a root."""
    root._get_fsdp_state()._lazy_init()


def replace_hook_before_backward(unit: FSDPModule, hook: Callable[[Any], Any] | None) -> None:
    """Let an FSDP unit call ``hook`` with its output instead of preparing its backward. None: as before."""
    state: Any = unit._get_fsdp_state()
    if hook is None:
        del state._register_pre_backward_hook
    else:
        state._register_pre_backward_hook = hook


def call_after_backward(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the inputs of a unit such that its group of parameters ends its backward when autograd has left it."""
    return group._register_post_backward_hook(args, kwargs)


def add_up_gradients(group: Any) -> None:
    """Add the gradients of a backward to those that a unit's group holds, in the dtype in which it reduces them.

    Until torch 2.14 a group holds them apart from ``parameter.grad``; since torch 2.15 they are there.
    """
    if hasattr(group, "_set_unsharded_grad_dtypes"):
        group._set_unsharded_grad_dtypes(defer_upcast=False)
        return
    for parameter in group.fsdp_params:
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def reduces_as_computed(group: Any) -> bool:
    """Whether the gradients of a unit's group of parameters are reduced in the dtype that a backward gives them."""
    return all(p.reduce_dtype in (None, p.param_dtype or p.orig_dtype) for p in group.fsdp_params)


def end_backward(root: FSDPModule) -> None:
    """Wait for all reductions of all units, as at the end of a backward; torch 2.15 wants to know who reduces."""
    state: Any = root._get_fsdp_state()
    state._state_ctx.manual_backward_finalization_active = False  # what the hook before the backward would set
    state._root_post_backward_final_callback()


def reset_after_error(root: Any) -> None:
    """Let FSDP's root, if it is one, forget a step that an error interrupted; until torch 2.12 it cannot by itself."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    elif isinstance(root, FSDPModule):
        context: Any = root._get_fsdp_state()._state_ctx
        context.iter_forward_root, context.post_backward_final_callback_queued = None, False
        for state in context.all_states:
            state._training_state = _fsdp_common.TrainingState.IDLE
            state._modules_to_run_forward.clear()
            state._comm_ctx.post_forward_order.clear()
            for group in _groups_of(state):
                group._training_state = _fsdp_common.TrainingState.IDLE
                group._post_forward_indices.clear()


def input_of_reduce_scatter(caller: Any) -> torch.Tensor | None:
    """Return the input buffer of FSDP's ``foreach_reduce``, whose frame is ``caller``, if it has allocated it."""
    return caller.f_locals.get("reduce_scatter_input")


def output_streams(handler: Any) -> tuple[Any, Any]:
    """Return the open files of stdout and stderr of a process that torch's launcher started; None: not to a file."""
    return handler._stdout, handler._stderr
