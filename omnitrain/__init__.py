"""omnitrain: combine HuggingFace encoders, a language model and decoders into one omni model, and train it.

Names are imported on first use, so ``import omnitrain`` alone does not import torch.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnitrain.data.loading.loader import build_dataloader
    from omnitrain.data.packing.fill_pack import OmniDataCollatorWithPacking
    from omnitrain.data.packing.pack import Pack
    from omnitrain.data.packing.sample import MediaSpan, Sample
    from omnitrain.data.render.chat_renderer import ChatRenderer
    from omnitrain.data.render.processor import OmniProcessor
    from omnitrain.data.render.template_renderer import TemplateRenderer
    from omnitrain.models.adapters.lora import merge_lora
    from omnitrain.models.components.outputs import OmniOutput
    from omnitrain.models.omni.build import build_foundation_model, build_omni_model
    from omnitrain.models.omni.model import OmniModel
    from omnitrain.ops.loss.cross_entropy import LossTerm
    from omnitrain.optim.gradients import clip_gradients, gradient_norm
    from omnitrain.parallel.layout import ComponentLayout, ModelLayout, layout_of
    from omnitrain.parallel.parallelize import build_parallelize_model
    from omnitrain.parallel.sequence.head_exchange import gather_heads_scatter_seq, gather_seq_scatter_heads
    from omnitrain.parallel.state import ParallelState, get_parallel_state, init_parallel_state
    from omnitrain.parallel.step.accumulate import accumulate_gradients
    from omnitrain.parallel.step.plan import step_planner
    from omnitrain.parallel.verify.verify import VerifyReport, VerifyRow
    from omnitrain.recipe import ComponentPlan, Layout, ParallelPlan, Precision, Recipe, parse_layout
    from omnitrain.train.trainer import Trainer
    from omnitrain.train.verbs.verify import verify

__version__ = "0.1.0"

_HOMES = {
    "ComponentLayout": "omnitrain.parallel.layout",
    "ModelLayout": "omnitrain.parallel.layout",
    "ChatRenderer": "omnitrain.data.render.chat_renderer",
    "ComponentPlan": "omnitrain.recipe",
    "Layout": "omnitrain.recipe",
    "LossTerm": "omnitrain.ops.loss.cross_entropy",
    "MediaSpan": "omnitrain.data.packing.sample",
    "OmniDataCollatorWithPacking": "omnitrain.data.packing.fill_pack",
    "OmniModel": "omnitrain.models.omni.model",
    "OmniOutput": "omnitrain.models.components.outputs",
    "OmniProcessor": "omnitrain.data.render.processor",
    "Pack": "omnitrain.data.packing.pack",
    "ParallelPlan": "omnitrain.recipe",
    "ParallelState": "omnitrain.parallel.state",
    "Precision": "omnitrain.recipe",
    "Recipe": "omnitrain.recipe",
    "Sample": "omnitrain.data.packing.sample",
    "TemplateRenderer": "omnitrain.data.render.template_renderer",
    "Trainer": "omnitrain.train.trainer",
    "VerifyReport": "omnitrain.parallel.verify.verify",
    "VerifyRow": "omnitrain.parallel.verify.verify",
    "accumulate_gradients": "omnitrain.parallel.step.accumulate",
    "build_dataloader": "omnitrain.data.loading.loader",
    "build_foundation_model": "omnitrain.models.omni.build",
    "build_omni_model": "omnitrain.models.omni.build",
    "build_parallelize_model": "omnitrain.parallel.parallelize",
    "clip_gradients": "omnitrain.optim.gradients",
    "gather_heads_scatter_seq": "omnitrain.parallel.sequence.head_exchange",
    "gather_seq_scatter_heads": "omnitrain.parallel.sequence.head_exchange",
    "get_parallel_state": "omnitrain.parallel.state",
    "gradient_norm": "omnitrain.optim.gradients",
    "init_parallel_state": "omnitrain.parallel.state",
    "layout_of": "omnitrain.parallel.layout",
    "merge_lora": "omnitrain.models.adapters.lora",
    "parse_layout": "omnitrain.recipe",
    "step_planner": "omnitrain.parallel.step.plan",
    "verify": "omnitrain.train.verbs.verify",
}

__all__ = [
    "ChatRenderer",
    "ComponentLayout",
    "ComponentPlan",
    "Layout",
    "LossTerm",
    "MediaSpan",
    "ModelLayout",
    "OmniDataCollatorWithPacking",
    "OmniModel",
    "OmniOutput",
    "OmniProcessor",
    "Pack",
    "ParallelPlan",
    "ParallelState",
    "Precision",
    "Recipe",
    "Sample",
    "TemplateRenderer",
    "Trainer",
    "VerifyReport",
    "VerifyRow",
    "accumulate_gradients",
    "build_dataloader",
    "build_foundation_model",
    "build_omni_model",
    "build_parallelize_model",
    "clip_gradients",
    "gather_heads_scatter_seq",
    "gather_seq_scatter_heads",
    "get_parallel_state",
    "gradient_norm",
    "init_parallel_state",
    "layout_of",
    "merge_lora",
    "parse_layout",
    "step_planner",
    "verify",
]


_RENAMED = {"AppliedComponent": "ComponentLayout", "AppliedLayout": "ModelLayout"}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"omnitrain.{name} is now omnitrain.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'omnitrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
