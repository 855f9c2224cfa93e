"""The facts that decide the windows of a model's encoders."""

from __future__ import annotations

from omnitrain.data.packing.sample import NATIVE_PREFIX
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.layout import layout_of
from omnitrain.parallel.pipeline.stages import parameters_met
from omnitrain.parallel.resolve import dtype_of
from omnitrain.plan.windows import WindowChoice, WindowChooser
from omnitrain.recipe.parallel import FOUNDATION, ComponentPlan


def window_chooser(model: OmniModel) -> WindowChooser | None:
    """Return what chooses the windows of each step; None: all steps have the same ones."""
    layout = layout_of(model)
    if layout is None:
        return None
    plans = {name: component.plan for name, component in layout.components.items()}
    choices = [
        WindowChoice(name, plan.encode.window, bytes_per_feature(model, name, plan), plan.encode.feature_bytes)
        for name, plan in plans.items()
        if plan.encode.window is not None
    ]
    if all(choice.is_fixed for choice in choices):
        return None
    num_parameters = {name: sum(p.numel() for p in weights.values()) for name, weights in model.components.items()}
    blocks, head = parameters_met(model)
    num_parameters |= {FOUNDATION: round(sum(blocks) + head)}
    return WindowChooser([choice for choice in choices if not choice.is_fixed], num_parameters)


def bytes_per_feature(model: OmniModel, component: str, plan: ComponentPlan) -> int:
    """Return the bytes of a feature, with all of its tensors; ``plan``: the complete one of an encoder or decoder."""
    dtype = dtype_of(plan.precision.compute) or model.dtype
    return _width(model, component) * dtype.itemsize


def _width(model: OmniModel, component: str) -> int:
    """Return how many values a feature has. Towers and teachers do not give rows as wide as the embeddings."""
    reader = next((reader for reader, tower in model.reads.items() if tower == component), None)
    if reader is not None:
        rows, _ = model.minimal_input(reader)
        return sum(tensor[0].numel() for tensor in rows.values())
    if component in model.teachers:
        return int(model.get_submodule(component).width)
    native, names = model.runner.native.interfaces, model.media_names[component]
    layouts = [native[name.removeprefix(NATIVE_PREFIX)].layout for name in names if name.startswith(NATIVE_PREFIX)]
    num_tensors = max((len(layout.names) for layout in layouts), default=1)
    return num_tensors * model.foundation.get_input_embeddings().weight.size(1)
