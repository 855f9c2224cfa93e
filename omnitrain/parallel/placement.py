"""The placement of each component, from the complete plans and the factorisation of the ranks; no rank is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.pipeline.stages import ranks_of_stages
from omnitrain.parallel.state import ParallelState
from omnitrain.plan.placement import EdgeKind, PipelineShape, Place, Placement, Topology
from omnitrain.recipe.parallel import FOUNDATION, MAIN, ComponentPlan
from omnitrain.recipe.plan_groups import PipelineSchedule


def place_components(
    model: OmniModel, plans: Mapping[str, ComponentPlan], states: Mapping[str, ParallelState]
) -> Topology:
    """Return where and when each component runs.

    Args:
        model: parallelized or not; what it freezes has no backward.
        plans: component -> its complete plan.
        states: component -> the factorisation of the ranks that have it, with process groups or without.
    """
    main = states[FOUNDATION]
    sections = list(main.sections.values()) or [main]
    of_stage = main.size("stage")
    names = (*model.media_names, FOUNDATION)
    settings = {n: _settings_of(plans[n], states[n], main, encodes=n != FOUNDATION) for n in names}
    if main.size("pp") > 1:  # the last stage computes the losses
        behind = of_stage * ranks_of_stages(plans[FOUNDATION].schedule, main.size("pp"))[-1]
        for name in model.teachers:
            in_main = settings[name]["edge"] == "forward"
            settings[name] |= {"at_end": True, "behind": 0 if in_main else behind}
    return Topology(
        world_size=main.num_ranks,
        components=tuple(Placement(**_facts_of(model, name), **settings[name]) for name in names),
        losses=("text", *model.decoder_names),
        data_groups=tuple(group for state in sections for group in _groups(state, "data")),
        first_stage=tuple(rank % of_stage if rank in main.ranks else rank for rank in range(main.num_ranks)),
        readers=main.ranks,
        pipeline=pipeline_shape(plans[FOUNDATION]),
    )


def place_copies(model: OmniModel, num_ranks: int) -> Topology:
    """Return the placements of a model that is not parallelized: each rank has a copy, and encodes for itself."""
    ranks = tuple(range(num_ranks))
    names = (*model.media_names, FOUNDATION)
    placements = [Placement(**_facts_of(model, name), ranks=ranks, num_replicas=num_ranks) for name in names]
    return Topology(num_ranks, tuple(placements), ("text", *model.decoder_names))


def pipeline_shape(plan: ComponentPlan) -> PipelineShape:
    """Return what decides the forwards and backwards of a foundation with this plan."""
    settings = plan.schedule or PipelineSchedule()
    overlap, extra = bool(settings.overlap), settings.extra_forwards
    return PipelineShape(
        settings.resolved_kind, plan.pp or 1, settings.stages_per_rank, settings.group_size, overlap, extra
    )


def calling_axes(plan: ComponentPlan) -> tuple[str, ...]:
    """Return the axes whose ranks make each call of a component's media together, with the same items.

    On ``sequence`` they share the tower's rows; on ``tp`` they share its matrices, or each of them encodes the items of
    its own samples (``place: local``).
    """
    return ("sequence",) * _shares_rows(plan) + ("tp",) * (_shares_matrices(plan) or plan.place == "local")


def calling_state(plan: ComponentPlan, own: ParallelState, section: ParallelState) -> ParallelState:
    """Return the state on whose :func:`calling_axes` ranks make a component's calls together.

    ``own``: whose ``tp`` ranks share its matrices; but if each rank encodes the items of its own samples, all ranks of
    the ``section`` that hold the same samples make its calls.
    """
    return section if plan.place == "local" else own


def _facts_of(model: OmniModel, name: str) -> dict[str, Any]:
    """The facts of a component that the model alone decides."""
    return {
        "name": name,
        "media": model.media_names.get(name, ()),
        "reads_packs": name == FOUNDATION,
        "head": name if name in model.decoder_names else None,
        "is_trained": model.has_backward(name),
        "reads": model.reads.get(name, ""),
    }


def _settings_of(plan: ComponentPlan, state: ParallelState, main: ParallelState, *, encodes: bool) -> dict[str, Any]:
    """The settings of a component that its plan decides on its ranks. ``encodes``: it is not the foundation."""
    edge = _edge_of(plan, state)
    ranks = main.ranks[: main.size("stage")] if edge == "forward" else state.ranks
    place: Place = (plan.place or "local") if encodes else "local"
    axes = calling_axes(plan)
    groups = _groups(calling_state(plan, state, main.of_section(state.section)), *axes)
    return {
        "ranks": ranks,
        "place": place,
        "num_replicas": len(ranks) // ((plan.dp_shard or 1) * (plan.tp or 1)),
        "call_groups": tuple(group for group in groups if group[0] in ranks),
        "is_shared": _shares_rows(plan) or _shares_matrices(plan),
        "window": None if isinstance(plan.encode.window, str) else plan.encode.window or 1,
        "call_elements": plan.encode.call_elements,
        "section": state.section,
        "edge": edge,
        "exchange": _exchange_of(edge, place, axes),
    }


def _edge_of(plan: ComponentPlan, state: ParallelState) -> EdgeKind:
    if state.section != MAIN:
        return "message"
    return "forward" if plan.encode.window is None else "exchange"


def _shares_rows(plan: ComponentPlan) -> bool:
    return (plan.ulysses or 1) > 1


def _shares_matrices(plan: ComponentPlan) -> bool:
    return (plan.tp or 1) > 1


def _exchange_of(edge: EdgeKind, place: Place, axes: tuple[str, ...]) -> str:
    """The axis of :attr:`Placement.exchange`: an action runs on all stages, a forward on one."""
    is_world = place == "world"
    if edge == "message":
        return ""
    if edge == "exchange" and is_world:
        return "pp_loss" if "tp" in axes else "all"
    if "sequence" in axes:
        return "tp"
    if "tp" in axes:
        return "loss" if is_world else "sequence"
    return "stage" if is_world else "data"


def _groups(state: ParallelState, *axes: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(group) for group in state.groups(*axes).tolist())
