"""Settings of sections that the model or the parallel state does not support."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.state import ParallelState
from omnitrain.recipe.parallel import FOUNDATION, MAIN, ComponentPlan, ParallelPlan
from omnitrain.recipe.suggest import hint


def section_problems(model: OmniModel, plan: ParallelPlan, state: ParallelState) -> list[str]:
    """Return all problems of the sections of a plan."""
    problems = [*_component_problems(model, plan), *_other_section_problems(plan)]
    planned = {name: section.ranks for name, section in plan.sections.items()}
    found = {name: other.world_size for name, other in state.sections.items() if name != MAIN}
    if not problems and planned != found:
        shown = ", ".join(f"{name} with {ranks} ranks" for name, ranks in found.items()) or "none"
        problems.append(
            f"sections: found {', '.join(planned)}, but the parallel state has {shown}; call "
            "init_parallel_state(sections=plan) with this plan"
        )
    return problems


def _component_problems(model: OmniModel, plan: ParallelPlan) -> Iterator[str]:
    """Sections have encoders, which no other section has."""
    encoders = [name for name in model.media_names if name not in model.decoder_names]
    times = Counter(name for section in plan.sections.values() for name in section.components)
    for section_name, section in plan.sections.items():
        path = f"sections.{section_name}.components"
        if section_name == MAIN:
            yield f"sections.{MAIN}: this name is that of the other ranks; use another one"
        for name in dict.fromkeys(section.components):
            if times[name] > 1:
                yield f"{path}: {name} is named {times[name]} times; a component has one section"
            elif name == FOUNDATION or name in model.decoder_names:
                yield (
                    f"{path}: found {name}, but only encoders can leave `main`: the foundation and decoders compute "
                    "the losses there (sections with outputs do not exist yet); remove it"
                )
            elif name not in encoders:
                yield f"{path}: unknown component {name!r}; {hint(name, encoders)}"


def _other_section_problems(plan: ParallelPlan) -> Iterator[str]:
    """Degrees that the components of a section cannot have."""
    for name, section in plan.sections.items():
        for component in section.components:
            own = plan.components.get(component, ComponentPlan())
            for field in ("pp", "tp", "cp"):
                if (degree := getattr(own, field) or 1) > 1:
                    yield (
                        f"components.{component}.{field}: found {degree}, but components of sections.{name} have only "
                        "dp_replicate, dp_shard, ulysses and ep; remove it"
                    )
