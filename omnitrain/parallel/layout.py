"""What :func:`build_parallelize_model` did to a model: kept with it, shown at the start, asked during training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from omnitrain.models.foundation.shared_tower import SharedTower
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.compile.blocks import CompiledBlocks
from omnitrain.parallel.layout_table import LayoutRow, LayoutTable
from omnitrain.parallel.memory.offload import ActivationOffload
from omnitrain.parallel.sequence.async_ulysses.apply import AsyncUlyssesModules
from omnitrain.parallel.state import ParallelState
from omnitrain.parallel.tensor.sequence_parallel import TokenSharding
from omnitrain.recipe.parallel import ComponentPlan

_ATTRIBUTE = "_applied_layout"


@dataclass(frozen=True, eq=False)
class ComponentLayout:
    """One component as it lies on the ranks.

    Attributes:
        name: of the component.
        plan: its plan, every field set.
        mesh: of its parameters.
        units: names of the modules that gather and reduce together; the empty name is the root.
        parameters: names of its parameters.
        is_trained: it has parameters that get a gradient.
        activations: its activation offload, if any.
        compiled: its compiled blocks, if any.
        driven: its attention modules, where projections shall overlap all-to-alls.
        tokens: whether tensor parallel ranks have some of its tokens between blocks, where they shall.
        tower: its blocks, where ranks that share a sequence make its calls together.
    """

    name: str
    plan: ComponentPlan
    mesh: DeviceMesh
    units: tuple[str, ...]
    parameters: tuple[str, ...]
    is_trained: bool
    activations: ActivationOffload | None = None
    compiled: CompiledBlocks | None = None
    driven: AsyncUlyssesModules | None = None
    tokens: TokenSharding | None = None
    tower: SharedTower | None = None

    @property
    def num_replicas(self) -> int:
        """Copies of its parameters."""
        return self.plan.dp_replicate or 1

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy."""
        return self.plan.dp_shard or 1


@dataclass(frozen=True, eq=False)
class ModelLayout:
    """The layout of a model.

    Attributes:
        state: the foundation's factorisation of the ranks.
        components: component -> how it lies on them.
    """

    state: ParallelState
    components: Mapping[str, ComponentLayout]

    def table(self, model: OmniModel) -> LayoutTable:
        """One row per component, to be printed."""
        own = dict(model.named_parameters())
        return LayoutTable(
            _row(component, [own[name] for name in component.parameters]) for component in self.components.values()
        )

    def offloaded(self, model: OmniModel) -> list[nn.Parameter]:
        """Trained parameters whose optimizer state lives in host memory."""
        own = dict(model.named_parameters())
        names = [n for c in self.components.values() if c.plan.optimizer_offload for n in c.parameters]
        return [own[name] for name in names if own[name].requires_grad]


def layout_of(model: OmniModel) -> ModelLayout | None:
    """What was applied to ``model``; None: nothing yet."""
    return getattr(model, _ATTRIBUTE, None)


def remember_layout(model: OmniModel, layout: ModelLayout) -> None:
    """Keep ``layout`` with the model it was applied to."""
    setattr(model, _ATTRIBUTE, layout)


def reduce_replicas(model: OmniModel, active_last: Mapping[str, bool]) -> None:
    """Say which components add their gradients across replicas in the backward of this micro-batch.

    Within a copy, gradients are reduced in every micro-batch; across copies once per step is enough: in the last one
    in which the component runs on any rank. A later one would not run its units at all, and their sums would be lost.

    Args:
        model: parallelized.
        active_last: component -> whether this is that micro-batch. Components left out stay as they were.
    """
    layout = layout_of(model)
    assert layout is not None, "build_parallelize_model was not called"
    for name, is_last in active_last.items():
        for unit in layout.components[name].units:
            # Bare parameters at the root may belong to other components: what it reduces varies between micro-batches.
            _unit(model, unit).set_requires_all_reduce(is_last or unit == "", recurse=False)


def _unit(model: OmniModel, name: str) -> FSDPModule:
    module = model.get_submodule(name)
    assert isinstance(module, FSDPModule)
    return module


def _row(component: ComponentLayout, parameters: list[nn.Parameter]) -> LayoutRow:
    plan = component.plan
    assert plan.precision is not None
    offload: dict[str, bool | None] = {
        "activations": plan.activation_offload,
        **{tensor.replace("_", " "): True for tensor in plan.offloaded_tensors or ()},
        "parameters": plan.parameter_offload,
        "optimizer": plan.optimizer_offload,
    }
    found = "+".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
    ops = f" ({len(plan.saved_ops)} ops kept)" if plan.saved_ops is not None else ""
    ops = f": {', '.join(plan.recomputed_parts)}" if plan.recomputed_parts else ops
    return LayoutRow(
        name=component.name,
        mode=plan.mode or "",
        mesh=_mesh(component),
        units=len(component.units),
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        dtypes=f"{found} / {plan.precision.compute or found} / {plan.precision.reduce}",
        recompute=f"{plan.recompute}{ops}",
        offload=", ".join(what for what, is_there in offload.items() if is_there) or "none",
        sequence=_sequence(component),
    )


def _mesh(component: ComponentLayout) -> str:
    tp = f" x tp {component.plan.tp}" if (component.plan.tp or 1) > 1 else ""
    by = " by DeepEP" if component.plan.expert_dispatcher == "deepep" else ""
    ep = f", ep {component.plan.ep}{by}" if (component.plan.ep or 1) > 1 else ""
    return f"{component.num_replicas} x {component.num_shards}{tp}{ep}"


def _sequence(component: ComponentLayout) -> str:
    degrees = {"ulysses": component.plan.ulysses or 1, "cp": component.plan.cp or 1}
    shared = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    return ", ".join(str(part) for part in (shared, component.driven, component.tokens) if part) or "whole"
