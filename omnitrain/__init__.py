"""omnitrain: combine HuggingFace encoders, a language model and decoders into one omni model, and train it.

Names are imported on first use, so ``import omnitrain`` alone does not import torch.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from omnitrain.exports import on_first_use, show_in_notebooks
from omnitrain.packages import warn_of_untested_versions

if TYPE_CHECKING:
    from omnitrain.checkpoint.optimizer import load_optimizer, save_optimizer
    from omnitrain.data.loading.loader import build_dataloader
    from omnitrain.data.packing.fill_pack import pack_all
    from omnitrain.data.packing.pack import Pack
    from omnitrain.data.packing.sample import MediaSpan, Rejected, Sample
    from omnitrain.data.render.chat_renderer import ChatRenderer
    from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking
    from omnitrain.data.render.processor import OmniProcessor
    from omnitrain.data.render.template_renderer import TemplateRenderer
    from omnitrain.data.sources.media import Waveform
    from omnitrain.data.sources.rows import Row, open_sources
    from omnitrain.models.adapters.lora import merge_lora
    from omnitrain.models.components.outputs import OmniOutput
    from omnitrain.models.omni.build import build_foundation_model, build_omni_model
    from omnitrain.models.omni.generate import Answer, generate
    from omnitrain.models.omni.model import OmniModel
    from omnitrain.ops.loss.cross_entropy import LossTerm
    from omnitrain.optim.gradients import clip_gradients, gradient_norm
    from omnitrain.parallel.fsdp.summon import gathered
    from omnitrain.parallel.layout import ComponentLayout, ModelLayout, layout_of
    from omnitrain.parallel.parallelize import build_parallelize_model
    from omnitrain.parallel.schedule.accumulate import accumulate_gradients
    from omnitrain.parallel.sequence.head_exchange import gather_heads_scatter_seq, gather_seq_scatter_heads
    from omnitrain.parallel.serving import serving
    from omnitrain.parallel.spawn.errors import RankError
    from omnitrain.parallel.spawn.launch import RankResults, launch
    from omnitrain.parallel.state import ParallelState, get_parallel_state, init_parallel_state, loss_peers
    from omnitrain.parallel.step.plan import step_planner
    from omnitrain.parallel.verify.verify import VerifyReport, VerifyRow
    from omnitrain.recipe import (
        ChatFormat,
        ComponentPlan,
        DataSource,
        Layout,
        ParallelPlan,
        Precision,
        Recipe,
        Sampling,
        parse_layout,
    )
    from omnitrain.train.build_from_recipe import load_checkpoint
    from omnitrain.train.callbacks import Callback
    from omnitrain.train.evaluate.evaluate import heldout_loss
    from omnitrain.train.trainer import Trainer
    from omnitrain.train.verbs.data_stats import data_stats
    from omnitrain.train.verbs.preview import preview
    from omnitrain.train.verbs.verify import verify

__version__ = "0.1.0"

_HOMES = {
    "Answer": "omnitrain.models.omni.generate",
    "Callback": "omnitrain.train.callbacks",
    "ChatFormat": "omnitrain.recipe",
    "ChatRenderer": "omnitrain.data.render.chat_renderer",
    "ComponentLayout": "omnitrain.parallel.layout",
    "ComponentPlan": "omnitrain.recipe",
    "DataSource": "omnitrain.recipe",
    "Layout": "omnitrain.recipe",
    "LossTerm": "omnitrain.ops.loss.cross_entropy",
    "MediaSpan": "omnitrain.data.packing.sample",
    "ModelLayout": "omnitrain.parallel.layout",
    "OmniDataCollatorWithPacking": "omnitrain.data.render.packing_collator",
    "OmniModel": "omnitrain.models.omni.model",
    "OmniOutput": "omnitrain.models.components.outputs",
    "OmniProcessor": "omnitrain.data.render.processor",
    "Pack": "omnitrain.data.packing.pack",
    "ParallelPlan": "omnitrain.recipe",
    "ParallelState": "omnitrain.parallel.state",
    "Precision": "omnitrain.recipe",
    "RankError": "omnitrain.parallel.spawn.errors",
    "RankResults": "omnitrain.parallel.spawn.launch",
    "Recipe": "omnitrain.recipe",
    "Rejected": "omnitrain.data.packing.sample",
    "Row": "omnitrain.data.sources.rows",
    "Sample": "omnitrain.data.packing.sample",
    "Sampling": "omnitrain.recipe",
    "TemplateRenderer": "omnitrain.data.render.template_renderer",
    "Trainer": "omnitrain.train.trainer",
    "VerifyReport": "omnitrain.parallel.verify.verify",
    "VerifyRow": "omnitrain.parallel.verify.verify",
    "Waveform": "omnitrain.data.sources.media",
    "accumulate_gradients": "omnitrain.parallel.schedule.accumulate",
    "build_dataloader": "omnitrain.data.loading.loader",
    "build_foundation_model": "omnitrain.models.omni.build",
    "build_omni_model": "omnitrain.models.omni.build",
    "build_parallelize_model": "omnitrain.parallel.parallelize",
    "clip_gradients": "omnitrain.optim.gradients",
    "data_stats": "omnitrain.train.verbs.data_stats",
    "gather_heads_scatter_seq": "omnitrain.parallel.sequence.head_exchange",
    "gather_seq_scatter_heads": "omnitrain.parallel.sequence.head_exchange",
    "gathered": "omnitrain.parallel.fsdp.summon",
    "generate": "omnitrain.models.omni.generate",
    "get_parallel_state": "omnitrain.parallel.state",
    "gradient_norm": "omnitrain.optim.gradients",
    "heldout_loss": "omnitrain.train.evaluate.evaluate",
    "init_parallel_state": "omnitrain.parallel.state",
    "launch": "omnitrain.parallel.spawn.launch",
    "layout_of": "omnitrain.parallel.layout",
    "load_checkpoint": "omnitrain.train.build_from_recipe",
    "load_optimizer": "omnitrain.checkpoint.optimizer",
    "loss_peers": "omnitrain.parallel.state",
    "merge_lora": "omnitrain.models.adapters.lora",
    "open_sources": "omnitrain.data.sources.rows",
    "pack_all": "omnitrain.data.packing.fill_pack",
    "parse_layout": "omnitrain.recipe",
    "preview": "omnitrain.train.verbs.preview",
    "save_optimizer": "omnitrain.checkpoint.optimizer",
    "serving": "omnitrain.parallel.serving",
    "step_planner": "omnitrain.parallel.step.plan",
    "verify": "omnitrain.train.verbs.verify",
}

__all__ = [
    "Answer",
    "Callback",
    "ChatFormat",
    "ChatRenderer",
    "ComponentLayout",
    "ComponentPlan",
    "DataSource",
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
    "RankError",
    "RankResults",
    "Recipe",
    "Rejected",
    "Row",
    "Sample",
    "Sampling",
    "TemplateRenderer",
    "Trainer",
    "VerifyReport",
    "VerifyRow",
    "Waveform",
    "accumulate_gradients",
    "build_dataloader",
    "build_foundation_model",
    "build_omni_model",
    "build_parallelize_model",
    "clip_gradients",
    "data_stats",
    "gather_heads_scatter_seq",
    "gather_seq_scatter_heads",
    "gathered",
    "generate",
    "get_parallel_state",
    "gradient_norm",
    "heldout_loss",
    "init_parallel_state",
    "launch",
    "layout_of",
    "load_checkpoint",
    "load_optimizer",
    "loss_peers",
    "merge_lora",
    "open_sources",
    "pack_all",
    "parse_layout",
    "preview",
    "save_optimizer",
    "serving",
    "step_planner",
    "verify",
]


_SHOWN_IN_NOTEBOOKS = {  # class -> the function that makes its HTML
    f"omnitrain.{name}": "omnitrain.report.notebook.as_html"
    for name in (
        "models.omni.model.OmniModel",
        "parallel.layout.ModelLayout",
        "parallel.layout_table.LayoutTable",
        "recipe.parallel.ParallelPlan",
    )
}

warn_of_untested_versions()
show_in_notebooks(_SHOWN_IN_NOTEBOOKS)
_on_first_use = on_first_use(__name__, _HOMES)
_RENAMED = {"AppliedComponent": "ComponentLayout", "AppliedLayout": "ModelLayout"}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"omnitrain.{name} is now omnitrain.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    return _on_first_use(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
