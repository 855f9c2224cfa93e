"""The layout that :func:`build_parallelize_model` applied to a model: stored on it, printed at start-up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch.distributed as dist
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import FSDPModule

from omnitrain.models.foundation.shared_tower import SharedTower
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.compile.blocks import CompiledBlocks
from omnitrain.optim.gradients import Holders, remember_holders
from omnitrain.parallel.fsdp.hold import HeldUnits
from omnitrain.parallel.memory.offload import ActivationOffload
from omnitrain.parallel.pipeline.apply import Pipeline
from omnitrain.parallel.sections.edges import FeatureEdge
from omnitrain.parallel.sequence.async_ulysses.check import AsyncUlyssesModules
from omnitrain.parallel.state import ParallelState
from omnitrain.parallel.tensor.sequence_parallel import TokenSharding
from omnitrain.plan.mesh import DENSE_AXES
from omnitrain.plan.placement import Topology
from omnitrain.recipe.parallel import ComponentPlan, Section
from omnitrain.terminal import as_text

LAYOUT_TITLE = "Layout (mesh: copies x shards; dtypes: parameters / compute / sums)"


@dataclass(frozen=True)
class LayoutRow:
    """One component in the table that is printed at start-up."""

    name: str
    section: str  # its section, and the ranks of that; empty without sections
    mode: str  # ``fsdp2``, ``hsdp`` or ``replicate``
    mesh: str  # copies x shards, then the tensor parallel and expert parallel degrees above 1
    units: int  # number of FSDP units on the ranks that have the component; in a pipeline, on this rank
    parameters: int  # number of elements of all parameters
    trainable: int  # number of elements of trained parameters
    dtypes: str  # dtypes of parameters, computation and gradient sums
    recompute: str  # the recompute mode, with saved ops or recomputed parts
    offload: str  # the tensors kept in host memory
    sequence: str  # how ranks share a sequence


LAYOUT_COLUMNS = ("component", *(field.name for field in fields(LayoutRow)[1:]))


class LayoutTable(tuple[LayoutRow, ...]):
    """Rows that ``print`` and rich's console show as a table; without sections, it has no such column."""

    __slots__ = ()

    def __rich__(self) -> Table:
        has_sections = any(row.section for row in self)
        columns = [name for name in LAYOUT_COLUMNS if name != "section" or has_sections]
        shown = Table(*columns, title=LAYOUT_TITLE, title_justify="left")
        for row in self:
            values = {**vars(row), "trainable": row.trainable or "frozen"}
            cells = (value for name, value in values.items() if has_sections or name != "section")
            shown.add_row(*(f"{value:,}" if isinstance(value, int) else value for value in cells))
        return shown

    def __repr__(self) -> str:
        return as_text(self.__rich__(), columns=160)


_ATTRIBUTE = "_applied_layout"


@dataclass(frozen=True, eq=False)
class ComponentLayout:
    """The layout of one component."""

    name: str
    plan: ComponentPlan  # its plan with every field set
    # names of its FSDP units, whose parameters are gathered and reduced together; ``""`` is the root
    units: tuple[str, ...]
    parameters: tuple[str, ...]  # names of its parameters
    num_units: int  # number of its FSDP units on the ranks of its section; in a pipeline, on this rank
    activations: ActivationOffload | None = None  # its activation offload, if any
    compiled: CompiledBlocks | None = None  # its compiled blocks, if any
    # its attention modules with async Ulysses, if the plan asks for it
    async_ulysses: AsyncUlyssesModules | None = None
    tokens: TokenSharding | None = None  # whether sequence parallelism was applied, if the plan asks for it
    tower: SharedTower | None = None  # its shared blocks, if the ranks of a sequence group make its calls together

    @property
    def has_replicas(self) -> bool:
        """Whether several groups of ranks have a copy of it, whose gradients they add up."""
        return (self.plan.dp_replicate or 1) > 1


@dataclass(frozen=True, eq=False)
class ModelLayout:
    """The layout of a model."""

    # the factorisation of the ranks of this rank's section. Without sections, the foundation uses it.
    state: ParallelState
    # component -> the state of the ranks that share its matrices: the state of its section, or one of its own.
    # The state of another section has no process groups.
    states: Mapping[str, ParallelState]
    components: Mapping[str, ComponentLayout]  # component -> its layout
    topology: Topology  # where and when each component runs
    pipeline: Pipeline | None  # the pipeline of the foundation; None: every rank of ``main`` has all blocks
    exchanges: Mapping[str, dist.ProcessGroup]  # component -> the ranks that exchange its features with this one
    section: Section | None = None  # the section of this rank; None: ``main``
    # component of a section -> this rank's end of its edge. Empty on ranks that no edge reaches.
    edges: Mapping[str, FeatureEdge] = field(default_factory=dict)
    losses: Mapping[str, FeatureEdge] = field(default_factory=dict)  # decoder of a section -> its end of that edge
    sections: Mapping[str, Section] = field(default_factory=dict)  # section -> its settings, in the order of ranks
    held: HeldUnits = field(kw_only=True, repr=False)  # this rank's FSDP units, for schedules that gather and reduce
    # name -> parameter that several stages of the pipeline hold
    shared: Mapping[str, nn.Parameter] = field(default_factory=dict, repr=False)

    @property
    def encodes_ahead(self) -> bool:
        """Whether this rank encodes items of the next step."""
        return self.section is not None and self.section.ahead > 0

    def holds(self, component: str) -> bool:
        """Whether this rank's section has the component."""
        return self.states[component].section == self.state.section

    @property
    def sharing(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """Component -> a context in which the ranks of a sequence group make its calls together."""
        return {name: found.tower.sharing for name, found in self.components.items() if found.tower is not None}

    def by_tp_ranks(self, model: OmniModel) -> Iterator[tuple[ParallelState, Iterable[nn.Parameter]]]:
        """Yield this rank's parameters, by the state whose ``tp`` ranks share the matrices of their component."""
        here = [name for name in self.components if self.holds(name)]
        for state in dict.fromkeys(self.states[name] for name in here):
            yield state, [p for n in here if self.states[n] is state for p in model.components[n].values()]

    def table(self, model: OmniModel | None) -> LayoutTable:
        """Return a printable table with one row per component; without ``model``, sizes and dtypes are empty."""
        parameters = {} if model is None else dict(model.named_parameters())
        return LayoutTable(
            _row(
                c.name,
                section_text(self.states[c.name]) if self.sections else "",
                c.plan,
                c.num_units,
                [parameters[name] for name in c.parameters] if parameters else [],
                *(c.async_ulysses, c.tokens),
            )
            for c in self.components.values()
        )

    def facts_of_sections(self) -> list[dict[str, Any]]:
        """Return name, first rank, components and sizes of axes of each section, as pictures and reports need them."""
        return [
            {
                "name": state.section,
                "first_rank": state.first_rank,
                "components": [name for name, of in self.states.items() if of.section == state.section],
                "axes": {axis: state.size(axis) for axis in DENSE_AXES},  # in the order in which ranks are numbered
                "ep": state.ep_size,
            }
            for state in list(self.state.sections.values()) or [self.state]
        ]

    def offloaded(self, model: OmniModel) -> list[nn.Parameter]:
        """Return the trained parameters whose optimizer state lives in host memory."""
        parameters = dict(model.named_parameters())
        names = [n for c in self.components.values() if c.plan.memory.offloads("optimizer") for n in c.parameters]
        trained = [parameters[name] for name in names if parameters[name].requires_grad]
        return [parameter for parameter in trained if not parameter.is_meta]


def planned_table(
    model: OmniModel,
    plans: Mapping[str, ComponentPlan],
    units: Mapping[str, Collection[str]],
    sections: Mapping[str, str],
) -> LayoutTable:
    """Return the table of a model that is not parallelized yet.

    Its dtypes are the present ones of the weights. It lacks settings that only the ranks decide, such as sequence
    parallelism. ``sections``: component -> :func:`section_text`.
    """
    return LayoutTable(
        _row(name, sections.get(name, ""), plans[name], len(units[name]), list(parameters.values()))
        for name, parameters in model.components.items()
    )


def section_text(state: ParallelState) -> str:
    """Return the name and the ranks of a section, such as ``vision, ranks 4 to 7``."""
    first, last = state.ranks[0], state.ranks[-1]
    return f"{state.section}, rank {first}" if first == last else f"{state.section}, ranks {first} to {last}"


def layout_of(model: OmniModel) -> ModelLayout | None:
    """Return the layout applied to ``model``; None if it is not parallelized."""
    return getattr(model, _ATTRIBUTE, None)


def remember_layout(model: OmniModel, layout: ModelLayout) -> None:
    """Store ``layout`` on the model, and the holders of its parameters for norms of its gradients."""
    pipeline, state = layout.pipeline, layout.state
    shared = {} if pipeline is None else pipeline.held_by_several(model)
    setattr(model, _ATTRIBUTE, replace(layout, shared=shared))
    if pipeline is not None or layout.sections:
        holders = Holders(
            stages=None if pipeline is None else pipeline.group,
            counted_elsewhere=frozenset() if pipeline is None else pipeline.counted_elsewhere(shared),
            sections=dist.group.WORLD if layout.sections else None,
            counts=state.rank == state.first_rank,
            device=state.device_type,
        )
        remember_holders(model, holders)


def reduce_replicas(model: OmniModel, active_last: Mapping[str, bool]) -> None:
    """Set which components all-reduce their gradients across replicas in the backward of this micro-batch.

    FSDP reduce-scatters within a replica in every micro-batch. One all-reduce across replicas per step is enough. It
    happens in the last micro-batch in which the component runs on any rank: in a later one its units do not run, and
    their gradient sums would be lost. ``active_last``: component -> whether this is that micro-batch.
    """
    layout = layout_of(model)
    assert layout is not None, "build_parallelize_model was not called"
    for name, is_last in active_last.items():
        component = layout.components[name]
        for unit in component.units if component.has_replicas else ():
            module = model.get_submodule(unit)
            assert isinstance(module, FSDPModule)
            # Root parameters belong to several components, so the root all-reduces in every micro-batch.
            module.set_requires_all_reduce(is_last or unit == "", recurse=False)


def reduce_all_replicas(model: OmniModel) -> None:
    """Undo :func:`reduce_replicas`: each reduction of a component's units goes across its replicas."""
    layout = layout_of(model)
    assert layout is not None, "build_parallelize_model was not called"
    reduce_replicas(model, dict.fromkeys(layout.components, True))


def _row(
    name: str, section: str, plan: ComponentPlan, units: int, parameters: list[nn.Parameter], *methods: object
) -> LayoutRow:
    """``methods``: of sequence parallelism; some may be None."""
    memory = plan.memory
    stored = "+".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
    ops = f" ({len(memory.kept_ops)} ops kept)" if memory.kept_ops is not None else ""
    ops = f": {', '.join(memory.recomputed_parts)}" if memory.recomputed_parts else ops
    return LayoutRow(
        name=name,
        section=section,
        mode=plan.mode or "",
        mesh=_mesh(plan),
        units=units,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        dtypes=f"{stored} / {plan.precision.compute or stored} / {plan.precision.reduce}",
        recompute=f"{memory.mode}{ops}",
        offload=", ".join(what.replace("_", " ") for what in memory.offload or ()) or "none",
        sequence=_sequence(plan, *methods),
    )


def _mesh(plan: ComponentPlan) -> str:
    tp = f" x tp {plan.tp}" if (plan.tp or 1) > 1 else ""
    by = " by DeepEP" if plan.experts.dispatcher == "deepep" else ""
    ep = f", ep {plan.ep}{by}" if (plan.ep or 1) > 1 else ""
    stages = f"pp {plan.pp} x " if (plan.pp or 1) > 1 else ""
    return f"{stages}{plan.dp_replicate or 1} x {plan.dp_shard or 1}{tp}{ep}"


def _sequence(plan: ComponentPlan, *methods: object) -> str:
    degrees = {"ulysses": plan.ulysses or 1, "cp": plan.cp or 1}
    shared = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    return ", ".join(str(part) for part in (shared, *methods) if part) or "whole"
