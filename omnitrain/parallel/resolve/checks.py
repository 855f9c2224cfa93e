"""What a plan and a parallel state ask that a model as a whole does not permit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from omnitrain.models.contract.checks_sequence import SequenceContract, sequence_contract_of
from omnitrain.models.contract.checks_tower import attached_tower_contract, native_tower_contract
from omnitrain.models.contract.tiny_model import drawn_in_training
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.expert.apply import ExpertLayer, own_plan_problems
from omnitrain.parallel.sequence.ulysses import head_problem
from omnitrain.parallel.state import ParallelState
from omnitrain.recipe.parallel import FOUNDATION, ParallelPlan


def model_problems(
    model: OmniModel, layers: Mapping[str, Sequence[ExpertLayer]], plan: ParallelPlan, state: ParallelState
) -> Iterator[str]:
    """All of it; ``layers``: component -> its layers of experts."""
    yield from _pipeline_problems(plan, state)
    yield from _sequence_problems(model, state)
    yield from _left_out_problems(model, state)
    yield from _tower_problems(model, plan, state)
    yield from _spread_problems(model, layers, plan, state)


def _pipeline_problems(plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    places = {"default": plan.default, **{f"components.{name}": own for name, own in plan.components.items()}}
    found = {f"{place}.pp": own.pp or 1 for place, own in places.items()}
    if max(found.values()) == 1:
        found["parallel state"] = state.size("pp")
    for path, degree in found.items():
        if degree > 1:
            yield f"{path}: found pp {degree}, but pipeline parallelism is not available yet; use 1"


def _spread_problems(
    model: OmniModel, layers: Mapping[str, Sequence[ExpertLayer]], plan: ParallelPlan, state: ParallelState
) -> Iterator[str]:
    """A model without experts has nothing to spread, and one rank nowhere to."""
    if state.size("ep") == 1:
        if plan.ep_plan:
            yield "ep_plan: found with ep 1, which spreads nothing; set ep above 1, or remove it"
        return
    yield from own_plan_problems(model, layers, plan)
    if not any(layers.values()):
        yield (
            f"{plan.path_of(FOUNDATION, 'ep')}.ep: found {state.size('ep')}, but no part of the model has experts that "
            f"ask transformers' ExpertsInterface ({type(model.foundation).__name__} is dense or keeps its own); use 1"
        )


def _sequence_problems(model: OmniModel, state: ParallelState) -> Iterator[str]:
    """Ranks share the foundation's sequence if that may lie on several ranks and its heads divide."""
    if state.size("sequence") == 1:
        return
    found = sequence_contract_of(model.foundation, model.runner.contract)
    if found.problem:
        kind = type(model.foundation).__name__
        yield f"parallel state: found {state.shape}, but ranks cannot share a sequence of {kind}: {found.problem}"
    config = model.foundation.config
    dropped = [name for name in drawn_in_training(config) if re.search(r"att.*drop", name)]
    if state.size("cp") > 1 and dropped:
        yield (
            f"parallel state: found {state.shape}, but attention around a ring does not honour dropout "
            f"({', '.join(dropped)} in the foundation's config); set cp to 1, or that to 0"
        )
    for heads in found.heads:
        if not heads % state.size("tp") and (problem := head_problem(heads // state.size("tp"), state.size("sp"))):
            yield f"parallel state: found {state.shape}: {problem}"


def _left_out_problems(model: OmniModel, state: ParallelState) -> Iterator[str]:
    """Ranks must call the same modules, whatever their samples are."""
    for found in model.runner.contract.skipped_modules if state.size("loss") > 1 else ():
        if found.problem:
            yield (
                f"parallel state: found {state.shape}, but only some samples use {found.module} of "
                f"{type(model.foundation).__name__}, and other ranks would wait for it: {found.problem}; use one rank"
            )


def _tower_problems(model: OmniModel, plan: ParallelPlan, state: ParallelState) -> Iterator[str]:
    """The ranks that share the foundation's sequence may share each call of a tower, too, if it permits that."""
    ranks = state.size("sequence")
    for name, own in plan.components.items():
        if name == FOUNDATION or name not in model.components:
            continue
        path, instead = f"components.{name}", "remove it (`place: group` shares whole items among these ranks)"
        if (own.cp or 1) > 1:
            yield f"{path}.cp: found {own.cp}, but only the foundation has a ring; {instead}"
        if (own.ulysses or 1) == 1:
            continue
        found = f"{path}.ulysses: found {own.ulysses}"
        if own.ulysses != ranks:
            allowed = f"use 1 or {ranks}" if ranks > 1 else "set ulysses or cp of the foundation, or remove it"
            yield f"{found}, but {_counted(ranks)} a sequence of the foundation ({state.shape}); {allowed}"
        elif own.place in ("local", "world"):
            yield f"{found} with `place: {own.place}`; the ranks that share a sequence share each item: remove one"
        elif (contract := _tower_contract(model, name)).problem:
            yield f"{found}, but ranks cannot share an item of {name}: {contract.problem}; {instead}"
        else:
            yield from (f"{found}: {problem}" for n in contract.heads if (problem := head_problem(n, ranks)))


def _counted(ranks: int) -> str:
    return "no ranks share" if ranks == 1 else f"{ranks} ranks share"


def _tower_contract(model: OmniModel, component: str) -> SequenceContract:
    if component in model.encoder_names:
        return attached_tower_contract(model.encoders[component])
    if component in model.decoder_names:
        return SequenceContract("it is a decoder")
    return native_tower_contract(model.foundation, model.runner.contract, component)
