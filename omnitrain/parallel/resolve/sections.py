"""Settings of sections that the model or the parallel state does not support."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from omnitrain.errors import ScheduleError
from omnitrain.models.omni.model import OmniModel
from omnitrain.packages import install_command
from omnitrain.parallel.placement import pipeline_shape
from omnitrain.parallel.sections.carriers.nixl import nixl_is_installed
from omnitrain.parallel.state import ParallelState
from omnitrain.plan.schedule.actions import Kind, SectionWindows
from omnitrain.plan.schedule.generators import least_micro_batches
from omnitrain.plan.schedule.sections import with_sections
from omnitrain.plan.schedule.table import table_of
from omnitrain.plan.schedule.validate import validate
from omnitrain.recipe.parallel import FOUNDATION, MAIN, ComponentPlan, ParallelPlan, Section, raise_problems
from omnitrain.recipe.plan_groups import PipelineSchedule
from omnitrain.recipe.suggest import hint


def divide_encoders(model: OmniModel, plan: ParallelPlan) -> None:
    """Make components of towers and projectors that sections name, and undo it for others, or raise PlanError."""
    raise_problems([*_divided_problems(model, plan)])
    model.divide(plan.divided_encoders())


def _divided_problems(model: OmniModel, plan: ParallelPlan) -> Iterator[str]:
    for name, section in plan.sections.items():
        for component in section.components:
            encoder, _, part = component.rpartition(".")
            if part not in ("tower", "projector"):
                continue
            path = f"sections.{name}.components: found {component}"
            tower, projector = f"{encoder}.tower", f"{encoder}.projector"
            if encoder not in model.encoder_names:
                known = ", ".join(model.encoder_names) or "none of this model"
                yield f"{path}, but only encoders that the recipe adds have a tower and a projector: {known}"
            elif any(encoder in other.components for other in plan.sections.values()):
                yield f"{path}, but {encoder} is named as a whole, too; remove one of the two"
            elif plan.section_of(tower) == MAIN:
                yield f"{path}, but {tower} is in `main`; name {tower} in a section, too, or remove it"
            elif plan.section_of(tower) == plan.section_of(projector) and component == tower:
                yield f"{path} and {projector} in one section; name {encoder} instead"


def section_problems(model: OmniModel, plan: ParallelPlan, state: ParallelState) -> list[str]:
    """Return all problems of the sections of a plan."""
    problems = [*_component_problems(model, plan), *_other_section_problems(plan, model.decoder_names)]
    problems += _carrier_problems(plan, state)
    planned = [(name, section.ranks) for name, section in plan.sections.items()]
    found = [(name, other.world_size) for name, other in state.sections.items() if name != MAIN]
    if not problems and planned != found:
        problems.append(
            f"sections: found {_listed(planned)}, but the parallel state has {_listed(found)}; call "
            "init_parallel_state(sections=plan) with this plan"
        )
    return problems


def _listed(sections: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name} with {ranks} rank{'s' * (ranks > 1)}" for name, ranks in sections) or "none"


def _component_problems(model: OmniModel, plan: ParallelPlan) -> Iterator[str]:
    """Sections have encoders and decoders, which no other section has."""
    times = Counter(name for section in plan.sections.values() for name in section.components)
    for section_name, section in plan.sections.items():
        path = f"sections.{section_name}.components"
        if section_name == MAIN:
            yield f"sections.{MAIN}: this name is that of the other ranks; use another one"
        for name in dict.fromkeys(section.components):
            if times[name] > 1:
                yield f"{path}: {name} is named {times[name]} times; a component has one section"
            elif name == FOUNDATION:
                yield f"{path}: found {name}, but it reads the packs, which are in `main`; remove it"
            elif name not in model.media_names:
                yield f"{path}: unknown component {name!r}; {hint(name, model.media_names)}"
            elif name in model.decoder_names:
                yield from (f"sections.{section_name}.{problem}" for problem in _decoder_problems(name, section))


def _decoder_problems(name: str, section: Section) -> Iterator[str]:
    """What a section with a decoder may not set."""
    if section.micro_batch > 1:
        yield (
            f"micro_batch: found {section.micro_batch}, but {name} computes the loss of each micro-batch before its "
            "backward; remove it"
        )
    if section.ahead:
        yield (
            f"ahead: found {section.ahead}, but {name} keeps what it encodes until the loss of the same step; remove it"
        )


def has_backward(plan: ParallelPlan, plans: Mapping[str, ComponentPlan], component: str) -> bool:
    """Return whether a component trains, or the tower that it reads. ``plans``: component -> its complete plan."""
    read = plan.reads().get(component)
    return not plans[component].freeze or (read is not None and not plans[read].freeze)


def full_windows(
    plan: ParallelPlan,
    plans: Mapping[str, ComponentPlan],
    name: str,
    num_micro_batches: int,
    decoders: Collection[str],
    at_end: Collection[str] = (),
) -> SectionWindows:
    """Return the windows of section ``name`` if each micro-batch of the step has media for all its components.

    ``decoders``: of the model; ``at_end``: the components whose features the last stage reads.
    """
    section = plan.sections[name]
    components = [component for component in plans if component in section.components]
    return SectionWindows(
        name=name,
        encoded=dict.fromkeys(components, range(0, num_micro_batches, section.micro_batch)),
        trained=frozenset(component for component in components if has_backward(plan, plans, component)),
        size=section.micro_batch,
        slots=section.slots,
        in_flight=section.in_flight,
        encode_twice=section.encode_twice,
        reads={reader: read for reader, read in plan.reads().items() if reader in components},
        heads={name: range(num_micro_batches) for name in components if name in decoders},
        at_end=not {*at_end}.isdisjoint(components),
    )


def idle_settings(plan: ParallelPlan, plans: Mapping[str, ComponentPlan]) -> Iterator[str]:
    """Yield the settings of sections that can have no effect; ``plans``: component -> its complete plan."""
    for name, section in plan.sections.items():
        trained = [component for component in section.components if has_backward(plan, plans, component)]
        kept = {} if trained else {"in_flight": section.in_flight, "encode_twice": section.encode_twice or None}
        for field, found in kept.items():
            if found is not None:
                why = "the section trains nothing and keeps no activations"
                yield f"sections.{name}.{field}: found {str(found).lower()}, but {why}; remove it"
        if trained and section.ahead:
            yield (
                f"sections.{name}.ahead: found {section.ahead}, but {trained[0]} trains, and the next step needs its "
                "new weights; freeze it, or remove ahead"
            )


def starving_sections(
    plan: ParallelPlan, plans: Mapping[str, ComponentPlan], decoders: Collection[str], teachers: Collection[str]
) -> Iterator[str]:
    """Yield the sections that would wait for ever; found once, since validating each step would take too long."""
    foundation, found = plans[FOUNDATION], dict[str, None]()
    at_end = teachers if (foundation.pp or 1) > 1 else ()
    settings = foundation.schedule or PipelineSchedule()
    group = least_micro_batches(settings.resolved_kind, foundation.pp or 1, settings.group_size)
    for name, section in plan.sections.items():
        together = _connected(plan, name)
        kept = max(plan.sections[each].in_flight or 0 for each in together)
        in_flight = section.micro_batch * (kept + 1)
        num_micro_batches = group * (4 + math.ceil(in_flight / group))  # steady, and of groups of equal size
        windows = [full_windows(plan, plans, each, num_micro_batches, decoders, at_end) for each in together]
        try:
            schedule = table_of(pipeline_shape(foundation), num_micro_batches)
            validate(with_sections(schedule, windows, dict.fromkeys((Kind.F, Kind.I, Kind.W), 1), lambda *_: 1.0))
        except ScheduleError as error:
            found[str(error)] = None
    yield from found


def _connected(plan: ParallelPlan, name: str) -> list[str]:
    """A section, and the sections that it exchanges features with, directly or not, in the order of the plan."""
    edges = [{plan.section_of(reader), plan.section_of(tower)} for reader, tower in plan.reads().items()]
    found = {name}
    for _ in edges:
        found |= set[str]().union(*(edge for edge in edges if MAIN not in edge and edge & found))
    return [section for section in plan.sections if section in found]


def _other_section_problems(plan: ParallelPlan, decoders: Collection[str]) -> Iterator[str]:
    """What sections that read each other's features cannot have; ``decoders``: of the model."""
    for name, section in plan.sections.items():
        for component in section.components:
            tower = plan.reads().get(component)
            if tower is None or (feeder := plan.section_of(tower)) == name:
                continue
            for other in (name, feeder):
                if decoder := next((n for n in plan.sections[other].components if n in decoders), None):
                    yield (
                        f"sections.{other}.components: found {decoder} beside a part of an encoder whose other part is "
                        f"in section {feeder if other == name else name}: `main` would wait for both, they for each "
                        "other; give the decoder a section of its own"
                    )
            if section.ahead:
                yield (
                    f"sections.{name}.ahead: found {section.ahead}, but {component} reads what {tower} encodes in the "
                    "same step; remove it"
                )
            if section.micro_batch != plan.sections[feeder].micro_batch:
                yield (
                    f"sections.{name}.micro_batch: found {section.micro_batch}, but {component} reads what {tower} "
                    f"encodes with sections.{feeder}.micro_batch {plan.sections[feeder].micro_batch}; use the same"
                )


def _carrier_problems(plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    """NIXL is optional, and moves host memory."""
    for name, section in plan.sections.items():
        if section.carrier == "nixl" and state.device_type != "cpu":
            yield (
                f"sections.{name}.carrier: found nixl with ranks on {state.device_type}, but it moves host memory "
                "only; use torch"
            )
        elif section.carrier == "nixl" and not nixl_is_installed():
            yield f"sections.{name}.carrier: found nixl, which is not installed; {install_command('nixl')}"
