"""Run one rank of a layout in this process, without the other ranks and without the content of weights.

The code that trains runs as it is: a process group of ranks that are not there, parameters that have a shape but take
no memory, and integers, such as positions, that are computed. So what a rank would hold, compute and send is counted
rather than modelled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omnitrain.data.loading.data_process import as_bytes
from omnitrain.data.packing.pack import MediaGroup, Pack
from omnitrain.garbage import only_new_garbage
from omnitrain.models.components.outputs import media_calls
from omnitrain.models.hf.stored_tensor import replace_value
from omnitrain.models.omni.encode import idle_prompt, with_all_inputs
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.rank_meter import leaves
from omnitrain.parallel.fsdp.units import ignored_params
from omnitrain.parallel.fsdp.weight_loader import WeightLoader
from omnitrain.parallel.parallelize import parallelize_alone
from omnitrain.parallel.resolve.sources import CallFlags
from omnitrain.parallel.state import ParallelState, init_state_of, leave_process_groups
from omnitrain.parallel.step.item_costs import given_costs
from omnitrain.parallel.step.media_dispatch import StepBatch, dispatch_media
from omnitrain.parallel.step.order import order_of_run
from omnitrain.parallel.step.plan import StepPlanner, topology_of
from omnitrain.parallel.step.windows import window_chooser
from omnitrain.plan.placement import Topology
from omnitrain.plan.tables import encode_table
from omnitrain.recipe.parallel import ParallelPlan
from omnitrain.torch_private import (
    ALL_TO_ALL,
    ARANGE,
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    buffers_of,
    packet_of,
)


class WithoutContent(FakeTensorMode):
    """Floats have no content; integers that depend on no float have."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_exact(func, args, kwargs):
            result = func(*args, **kwargs)
            if packet_of(func) is ALL_TO_ALL:  # every rank sends the same numbers of rows
                args[0].copy_(args[1])
            return result
        return super().__torch_dispatch__(func, types, args, kwargs)


def _is_exact(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation makes integers from integers alone."""
    dtype = kwargs.get("dtype")
    if dtype is not None and dtype.is_floating_point:
        return False
    reads = False
    for value in leaves((args, kwargs)):
        if isinstance(value, Tensor):
            reads = True
            if isinstance(value, FakeTensor) or value.is_floating_point() or value.is_complex():
                return False
    if reads or dtype is not None:
        return True
    return packet_of(func) is ARANGE and all(isinstance(value, int) for value in args)


class _NoWeights(WeightLoader):
    """Gives a rank weights without content, of its own parameters alone."""

    def __init__(self, mode: WithoutContent, model: OmniModel, device: torch.device, *_: Any) -> None:
        self._mode, self._model, self._device, self.absent = mode, model, device, ()
        self._ignored = ignored_params(model)  # those FSDP knows by identity, and they are few

    @cached_property
    def _holders(self) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
        """The modules that hold each parameter, and its name there, once tensor parallelism has replaced some."""
        absent = {parameter for name, parameter in self._model.named_parameters() if name in self.absent}
        found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self._model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in absent:
                    found.setdefault(parameter, []).append((module, name))
        return found

    def fill(self, module: nn.Module) -> None:
        for parameter in list(module.parameters()):
            holders = self._holders.pop(parameter, [])
            if parameter in self._ignored:
                replace_value(parameter, torch.zeros(parameter.shape, dtype=parameter.dtype, device=self._device))
            elif holders:
                made = nn.Parameter(self._without_content(parameter), parameter.requires_grad)
                for holder, name in holders:
                    holder.register_parameter(name, made)

    def _without_content(self, parameter: Tensor) -> Tensor:
        if isinstance(parameter, DTensor):
            local = self._without_content(parameter.to_local())
            return DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        with self._mode:
            return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self._device)

    def finish(self) -> None:
        self.fill(self._model)
        for module in self._model.modules():
            buffers = buffers_of(module)
            for name in [name for name, buffer in buffers.items() if buffer is not None and buffer.is_meta]:
                buffers[name] = self._buffer(buffers[name])

    def _buffer(self, meta: Tensor) -> Tensor:
        if meta.is_floating_point():
            return self._without_content(meta)
        return torch.zeros(meta.shape, dtype=meta.dtype, device=self._device)


@contextmanager
def fake_world(num_ranks: int, rank: int = 0) -> Iterator[WithoutContent]:
    """Be one of ``num_ranks`` ranks, of which the others are not there. Collectives return at once.

    Enter the mode that it yields for what computes.
    """
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    sys.excepthook = hook  # torch's would put this rank before each line of an error, also after the fake world
    try:
        with only_new_garbage():  # collections would mostly look at older objects
            yield WithoutContent()
    finally:
        leave_process_groups()


def parallelize_in(
    mode: WithoutContent, model: OmniModel, plan: ParallelPlan, mixed_precision: bool | None
) -> ParallelState:
    """Apply a recipe's plan to a model on the meta device, as this rank of a fake world has it."""
    state = init_state_of(plan)
    parallelize_alone(model, state, plan, CallFlags(mixed_precision), partial(_NoWeights, mode))
    return state


def plan_alone(model: OmniModel, packs: Sequence[Pack]) -> StepBatch:
    """Plan a step for which every rank that draws packs has drawn ``packs``."""
    topology, rank = topology_of(model), dist.get_rank()
    own = [with_all_inputs(pack, model.divided, model.teachers) for pack in packs]
    items = list(_items(topology, own)) * len(topology.owners)

    def swap(_: Sequence[bytes]) -> list[bytes]:
        return [as_bytes(dict(enumerate(items)))]  # all that any rank may send

    def tables(own: np.ndarray) -> list[np.ndarray]:
        nothing = encode_table(topology, ())
        return [own if topology.is_owner(rank) else nothing for rank in range(topology.world_size)]

    peers: Any = SimpleNamespace(
        rendezvous=SimpleNamespace(rank=topology.owner_of(topology.readers[0])),  # the table of a rank that has packs
        tables=tables,
        swap=swap,
    )
    planner = StepPlanner(
        topology=topology,
        peers=peers,
        apart=dict(model.runner.apart),
        idle=idle_prompt(model),
        windows=window_chooser(model),
        costs=given_costs(model),
        order=order_of_run(model),
        divided=model.divided,
        teachers=model.teachers,
    )
    return dispatch_media(planner(packs).plan, rank, own if rank in topology.readers else [], swap)


def _items(topology: Topology, packs: Sequence[Pack]) -> Iterator[MediaGroup]:
    """The items of packs, in the order in which a step numbers those of a rank."""
    for pack in packs:
        batches = {**pack.inputs, **pack.targets}
        for name in topology.media:
            if name in batches:
                yield from media_calls(batches[name], apart="items")
