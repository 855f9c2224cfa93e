"""omnitrain: combine HuggingFace encoders, a language model and decoders into one omni model, and train it.

Names are imported on first use, so ``import omnitrain`` alone does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnitrain.exports import on_first_use, show_in_notebooks
from omnitrain.packages import warn_of_untested_versions

if TYPE_CHECKING:
    from omnitrain.checkpoint.optimizer import load_optimizer as load_optimizer
    from omnitrain.checkpoint.optimizer import save_optimizer as save_optimizer
    from omnitrain.data.loading.loader import build_dataloader as build_dataloader
    from omnitrain.data.packing.budget import pack_all as pack_all
    from omnitrain.data.packing.pack import Pack as Pack
    from omnitrain.data.packing.sample import MediaSpan as MediaSpan
    from omnitrain.data.packing.sample import Rejected as Rejected
    from omnitrain.data.packing.sample import Sample as Sample
    from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking as OmniDataCollatorWithPacking
    from omnitrain.data.render.processor import OmniProcessor as OmniProcessor
    from omnitrain.data.render.renderer import ChatRenderer as ChatRenderer
    from omnitrain.data.render.template_renderer import TemplateRenderer as TemplateRenderer
    from omnitrain.data.sources.media import Waveform as Waveform
    from omnitrain.data.sources.rows import Row as Row
    from omnitrain.data.sources.rows import open_sources as open_sources
    from omnitrain.models.adapters.lora import merge_lora as merge_lora
    from omnitrain.models.components.outputs import OmniOutput as OmniOutput
    from omnitrain.models.omni.build import build_foundation_model as build_foundation_model
    from omnitrain.models.omni.build import build_omni_model as build_omni_model
    from omnitrain.models.omni.generate import Answer as Answer
    from omnitrain.models.omni.generate import generate as generate
    from omnitrain.models.omni.model import OmniModel as OmniModel
    from omnitrain.ops.loss.cross_entropy import LossTerm as LossTerm
    from omnitrain.optim.gradients import clip_gradients as clip_gradients
    from omnitrain.optim.gradients import gradient_norm as gradient_norm
    from omnitrain.parallel.layout import ComponentLayout as ComponentLayout
    from omnitrain.parallel.layout import ModelLayout as ModelLayout
    from omnitrain.parallel.layout import layout_of as layout_of
    from omnitrain.parallel.parallelize import build_parallelize_model as build_parallelize_model
    from omnitrain.parallel.schedule.accumulate import accumulate_gradients as accumulate_gradients
    from omnitrain.parallel.sequence.head_exchange import gather_heads_scatter_seq as gather_heads_scatter_seq
    from omnitrain.parallel.sequence.head_exchange import gather_seq_scatter_heads as gather_seq_scatter_heads
    from omnitrain.parallel.spawn.errors import RankError as RankError
    from omnitrain.parallel.spawn.launch import RankResults as RankResults
    from omnitrain.parallel.spawn.launch import launch as launch
    from omnitrain.parallel.state import ParallelState as ParallelState
    from omnitrain.parallel.state import get_parallel_state as get_parallel_state
    from omnitrain.parallel.state import init_parallel_state as init_parallel_state
    from omnitrain.parallel.step.plan import step_planner as step_planner
    from omnitrain.parallel.verify.verify import VerifyReport as VerifyReport
    from omnitrain.parallel.verify.verify import VerifyRow as VerifyRow
    from omnitrain.recipe import ChatFormat as ChatFormat
    from omnitrain.recipe import ComponentPlan as ComponentPlan
    from omnitrain.recipe import DataSource as DataSource
    from omnitrain.recipe import Layout as Layout
    from omnitrain.recipe import ParallelPlan as ParallelPlan
    from omnitrain.recipe import Precision as Precision
    from omnitrain.recipe import Recipe as Recipe
    from omnitrain.recipe import Sampling as Sampling
    from omnitrain.recipe import parse_layout as parse_layout
    from omnitrain.train.build_from_recipe import load_checkpoint as load_checkpoint
    from omnitrain.train.callbacks import Callback as Callback
    from omnitrain.train.evaluate.evaluate import heldout_loss as heldout_loss
    from omnitrain.train.trainer import Trainer as Trainer
    from omnitrain.train.verbs.data_stats import data_stats as data_stats
    from omnitrain.train.verbs.preview import preview as preview
    from omnitrain.train.verbs.verify import verify as verify

__version__ = "0.1.0"

_NAMES = {  # module -> the names that it has
    "checkpoint.optimizer": "load_optimizer save_optimizer",
    "data.loading.loader": "build_dataloader",
    "data.packing.budget": "pack_all",
    "data.packing.pack": "Pack",
    "data.packing.sample": "MediaSpan Rejected Sample",
    "data.render.renderer": "ChatRenderer",
    "data.render.packing_collator": "OmniDataCollatorWithPacking",
    "data.render.processor": "OmniProcessor",
    "data.render.template_renderer": "TemplateRenderer",
    "data.sources.media": "Waveform",
    "data.sources.rows": "Row open_sources",
    "models.adapters.lora": "merge_lora",
    "models.components.outputs": "OmniOutput",
    "models.omni.build": "build_foundation_model build_omni_model",
    "models.omni.generate": "Answer generate",
    "models.omni.model": "OmniModel",
    "ops.loss.cross_entropy": "LossTerm",
    "optim.gradients": "clip_gradients gradient_norm",
    "parallel.layout": "ComponentLayout ModelLayout layout_of",
    "parallel.parallelize": "build_parallelize_model",
    "parallel.schedule.accumulate": "accumulate_gradients",
    "parallel.sequence.head_exchange": "gather_heads_scatter_seq gather_seq_scatter_heads",
    "parallel.spawn.errors": "RankError",
    "parallel.spawn.launch": "RankResults launch",
    "parallel.state": "ParallelState get_parallel_state init_parallel_state",
    "parallel.step.plan": "step_planner",
    "parallel.verify.verify": "VerifyReport VerifyRow",
    "recipe": "ChatFormat ComponentPlan DataSource Layout ParallelPlan Precision Recipe Sampling parse_layout",
    "train.build_from_recipe": "load_checkpoint",
    "train.callbacks": "Callback",
    "train.evaluate.evaluate": "heldout_loss",
    "train.trainer": "Trainer",
    "train.verbs.data_stats": "data_stats",
    "train.verbs.preview": "preview",
    "train.verbs.verify": "verify",
}
_HOMES = {name: f"omnitrain.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_HOMES)

warn_of_untested_versions()
_SHOWN_IN_NOTEBOOKS = {
    f"omnitrain.{name}": "omnitrain.report.notebook.as_html"
    for name in (
        "models.omni.model.OmniModel",
        "parallel.layout.ModelLayout",
        "parallel.layout_table.LayoutTable",
        "recipe.parallel.ParallelPlan",
    )
}
show_in_notebooks(_SHOWN_IN_NOTEBOOKS)
__getattr__ = on_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
