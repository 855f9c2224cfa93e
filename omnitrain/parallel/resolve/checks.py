"""Settings of a plan and a parallel state that the model as a whole does not support."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from omnitrain.errors import ScheduleError
from omnitrain.models.contract.checks_sequence import (
    SequenceContract,
    attached_tower_contract,
    native_tower_contract,
    sequence_contract_of,
)
from omnitrain.models.contract.tiny_model import drawn_in_training
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.expert.apply import ExpertLayer, own_plan_problems
from omnitrain.parallel.fsdp.units import find_units, ignored_params
from omnitrain.parallel.pipeline.stages import stages_of
from omnitrain.parallel.sequence.ulysses import head_problem
from omnitrain.parallel.state import ParallelState
from omnitrain.recipe.parallel import FOUNDATION, MAIN, ParallelPlan, value_of
from omnitrain.recipe.plan_groups import PipelineSchedule


def model_problems(
    model: OmniModel, layers: Mapping[str, Sequence[ExpertLayer]], plan: ParallelPlan, state: ParallelState
) -> Iterator[str]:
    """Yield all problems; ``layers``: component -> its MoE layers."""
    yield from _pipeline_problems(model, plan, state)
    yield from _sequence_problems(model, plan, state)
    yield from _skipped_module_problems(model, state)
    yield from _tower_problems(model, plan, state)
    yield from _spread_problems(model, layers, plan, state)
    yield from _window_problems(model, plan, state)
    yield from _teacher_problems(model, plan, state)


def _teacher_problems(model: OmniModel, plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    """The last stage of a pipeline reads the hidden states of teachers, and the first one the features of all else."""
    for name in model.teachers if state.size("pp") > 1 else ():
        section = plan.section_of(name)
        others = sorted({*plan.sections[section].components} - {*model.teachers}) if section != MAIN else []
        if others:
            yield (
                f"sections.{section}.components: found {others[0]} beside the teacher {name}, but with pp the first "
                f"stage reads the features of {others[0]}, and the last stage the hidden states of {name}; give each a "
                "section of its own"
            )


def _pipeline_problems(model: OmniModel, plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    """Only the foundation is cut into stages, where its contract allows a cut."""
    foundation, ranks = plan.of(FOUNDATION), state.size("pp")
    schedule, path = foundation.schedule or PipelineSchedule(), plan.path_of(FOUNDATION, "schedule")
    if schedule.overlap:
        yield from _overlap_problems(plan, state)
    if ranks == 1:
        own = PipelineSchedule(overlap=schedule.overlap, extra_forwards=schedule.extra_forwards)
        if foundation.schedule is not None and (schedule != own or own == PipelineSchedule()):
            what = "found with pp 1, where all but `overlap` and `extra_forwards` does nothing"
            yield f"{path}.schedule: {what}; set pp above 1, or remove it"
        elif schedule.extra_forwards and not any(plan.section_of(name) != MAIN for name in model.decoder_names):
            what = f"found {schedule.extra_forwards} with pp 1, where it makes room for losses of decoders in sections"
            yield f"{path}.schedule.extra_forwards: {what}, but there are none; remove it"
        return
    found = f"{plan.path_of(FOUNDATION, 'pp')}.pp: found {ranks}"
    if problem := model.stage_contract.problem:
        yield f"{found}, but {type(model.foundation).__name__} cannot be cut into stages: {problem}; use 1"
    else:
        try:
            stages_of(model, schedule, state)
        except ScheduleError as error:
            yield f"{found}: {error}"
    if foundation.compile and schedule.kind == "zbv":
        path = plan.path_of(FOUNDATION, "compile")
        yield (
            f"{path}.compile: found true with `schedule: {{kind: zbv}}`, but compiled blocks cannot delay the "
            "gradients of their weights; remove one of the two"
        )


def _overlap_problems(plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    """A forward and a backward give turns at the all-to-alls of experts."""
    found = f"{plan.path_of(FOUNDATION, 'schedule')}.schedule.overlap: found true"
    if state.size("ep") == 1:
        yield f"{found} with ep 1, where no all-to-all of experts can be hidden; set ep above 1, or remove it"
    elif plan.of(FOUNDATION).experts.dispatcher == "deepep":
        yield f"{found} with `experts.dispatcher: deepep`, whose exchanges do not give turns; remove one of the two"


def _spread_problems(
    model: OmniModel, layers: Mapping[str, Sequence[ExpertLayer]], plan: ParallelPlan, state: ParallelState
) -> Iterator[str]:
    """Expert parallelism needs several ranks and a model with experts."""
    if state.size("ep") == 1:
        if plan.ep_plan:
            yield "ep_plan: found with ep 1, where it does nothing; set ep above 1, or remove it"
        return
    yield from own_plan_problems(model, layers, plan)
    if not any(layers.values()):
        yield (
            f"{plan.path_of(FOUNDATION, 'ep')}.ep: found {state.size('ep')}, but no component has experts that call "
            f"transformers' ExpertsInterface ({type(model.foundation).__name__} is dense, or computes its experts "
            "without it); use 1"
        )


def _window_problems(model: OmniModel, plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    """A component that runs outside of the forwards needs FSDP units with all of its parameters."""
    for name in model.media_names:
        merged, section = plan.of(name), plan.section_of(name)
        is_in_forwards = (merged.encode.window or 1) == 1 and not (state.size("pp") > 1 and merged.place == "world")
        if section == MAIN and (is_in_forwards or name in model.decoder_names):
            continue
        inside = {p for unit in find_units(model)[name].all for p in model.get_submodule(unit).parameters()}
        inside |= ignored_params(model)
        outside = [path for path, p in model.components[name].items() if p not in inside]
        if outside:
            field = "encode.window" if merged.encode.window is not None else "place"
            found = f"{plan.path_of(name, field)}.{field}: found {value_of(merged, field)}"
            if section != MAIN:
                found = f"sections.{section}.components: found {name}"
            yield (
                f"{found}, but {outside[0]} belongs to modules that ranks call unequally often, or that other "
                "components use; remove it"
            )


def _sequence_problems(model: OmniModel, plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    """Ranks can share the foundation's sequence if the model supports slices of it and its heads divide equally."""
    if state.size("sequence") == 1:
        return
    contract, kind = sequence_contract_of(model.foundation, model.runner.contract), type(model.foundation).__name__
    if contract.problem:
        found = _found(plan, state, "ulysses", "cp")
        yield f"{found}, but ranks cannot share a sequence of {kind}: {contract.problem}"
    config = model.foundation.config
    dropped = [name for name in drawn_in_training(config) if re.search(r"att.*drop", name)]
    if state.size("cp") > 1 and dropped:
        yield (
            f"{_found(plan, state, 'cp')}, but ring attention ignores attention dropout "
            f"({', '.join(dropped)} in the foundation's config); set cp to 1, or the dropout to 0"
        )
    for heads in contract.heads:
        if not heads % state.size("tp") and (problem := head_problem(heads // state.size("tp"), state.size("sp"))):
            yield f"{_found(plan, state, 'ulysses')}, but {problem}"


def _found(plan: ParallelPlan, state: ParallelState, *fields: str) -> str:
    """The degrees of the foundation that the plan sets among ``fields``, with their key; else those of the state."""
    merged = plan.of(FOUNDATION)
    if (field := next((name for name in fields if (getattr(merged, name) or 1) > 1), None)) is None:
        return f"parallel state: found {state.shape}"
    return f"{plan.path_of(FOUNDATION, field)}.{field}: found {value_of(merged, field)}"


def _skipped_module_problems(model: OmniModel, state: ParallelState) -> Iterator[str]:
    """All ranks must call the same modules, whatever their samples are."""
    for skipped in model.runner.contract.skipped_modules if state.size("loss") > 1 else ():
        if skipped.problem:
            yield (
                f"parallel state: found {state.shape}, but only some samples use {skipped.module} of "
                f"{type(model.foundation).__name__}, and ranks that use it would wait for the others: "
                f"{skipped.problem}; use one rank"
            )


def _tower_problems(model: OmniModel, plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    """A tower's call can be shared by all ranks of a sequence group, or by none of them."""
    instead = "remove it (`place: group` divides whole items among these ranks)"
    for name, tower in plan.components.items():
        if name in (FOUNDATION, *model.reads) or name not in model.components or (tower.ulysses or 1) == 1:
            continue
        section = plan.section_of(name)
        own = state.of_section(section)
        ranks, found = own.size("sequence"), f"components.{name}.ulysses: found {tower.ulysses}"
        if tower.ulysses != ranks:
            whose = "the foundation" if section == MAIN else plan.sections[section].components[0]
            allowed = f"use 1 or {ranks}" if ranks > 1 else f"set ulysses or cp of {whose}, or remove it"
            sharing = "no ranks share" if ranks == 1 else f"{ranks} ranks share"
            yield f"{found}, but {sharing} a sequence of {whose} ({own.shape}); {allowed}"
        elif tower.place in ("local", "world"):
            yield (
                f"{found} with `place: {tower.place}`, but with ulysses the ranks that share a sequence share each "
                "item; remove one of the two"
            )
        elif (contract := _tower_contract(model, name)).problem:
            yield f"{found}, but ranks cannot share an item of {name}: {contract.problem}; {instead}"
        else:
            yield from (f"{found}: {problem}" for n in contract.heads if (problem := head_problem(n, ranks)))


def _tower_contract(model: OmniModel, component: str) -> SequenceContract:
    if component in model.teachers:
        teacher = model.get_submodule(component)
        return sequence_contract_of(teacher.model, teacher.runner.contract)
    if (encoder := component.removesuffix(".tower")) in model.encoder_names:
        return attached_tower_contract(model.encoders[encoder])
    if component in model.decoder_names:
        return SequenceContract("it is a decoder")
    return native_tower_contract(model.foundation, model.runner.contract, component)
