"""Connect the sections of a model: an edge for each of their components."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from omnitrain.models.discovery import MediaFeatures
from omnitrain.models.omni.encode import call_component
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.collectives import gathered_objects
from omnitrain.parallel.sections.edges import FeatureEdge, FeatureForm
from omnitrain.parallel.sections.message import Ends
from omnitrain.parallel.state import ParallelState
from omnitrain.recipe.parallel import MAIN, Section


def connect_sections(
    model: OmniModel, sections: Mapping[str, Section], state: ParallelState, device: torch.device
) -> dict[str, FeatureEdge]:
    """Return component -> this rank's end of its edge. All ranks must call it.

    An edge goes to the section with the component that reads the features: most often the foundation in ``main``. Each
    section encodes its smallest input once, and tells the other ranks the form of the features.

    Args:
        model: sharded; each rank has the components of its section.
        sections: section -> its settings.
        state: the state of this rank's section.
        device: of this rank.
    """
    own = sections[state.section].components if state.section in sections else ()
    forms = {name: _form(model, name, device) for name in own}
    for of_rank in gathered_objects(forms):
        forms |= of_rank
    edges = {}
    section_of = {component: name for name, section in sections.items() for component in section.components}
    reader_of = {read: section_of.get(reader, MAIN) for reader, read in model.reads.items()}
    for section_name, section in sections.items():
        senders = state.of_section(section_name).ranks
        for component in section.components:
            form = forms[component]._replace(pattern=_on(forms[component].pattern, device))
            ends = Ends(section_name, reader_of.get(component, MAIN))
            reading = state.of_section(ends.target)
            receivers = reading.ranks[: reading.size("stage")]  # of the first stage
            made = FeatureEdge(
                component, form, ends, senders, receivers, slots=section.slots, device=device, carrier=section.carrier
            )
            if state.rank in (*senders, *receivers):
                edges[component] = made
    return edges


def _form(model: OmniModel, component: str, device: torch.device) -> FeatureForm:
    """Encode the smallest input of a component; all ranks of its section take part."""
    first = model.media_names[component][0]
    of_gpu = [device] if device.type == "cuda" else []  # by default, those of all GPUs of the node
    with torch.no_grad(), torch.random.fork_rng(of_gpu):
        pattern = call_component(model, component, {}, {first: 1}).pattern.without_items()
    return FeatureForm(_on(pattern, torch.device("cpu")), model.has_backward(component))


def _on(pattern: MediaFeatures, device: torch.device) -> MediaFeatures:
    moved = pattern.with_tensors([tensor.to(device) for tensor in pattern.tensors()], ())
    return replace(moved, shared={name: tensor.to(device) for name, tensor in pattern.shared.items()})
