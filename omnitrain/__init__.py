"""omnitrain: combine HuggingFace encoders, a language model and decoders into one omni model, and train it.

Names are imported on first use, so ``import omnitrain`` alone does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnitrain.exports import homes_in, on_first_use, show_in_notebooks
from omnitrain.packages import warn_of_untested_versions

if TYPE_CHECKING:
    from omnitrain import checkpoint as checkpoint
    from omnitrain import data as data
    from omnitrain import models as models
    from omnitrain import notebook as notebook
    from omnitrain import optim as optim
    from omnitrain import parallel as parallel
    from omnitrain import recipe as recipe
    from omnitrain.data.loading.loader import build_dataloader as build_dataloader
    from omnitrain.data.packing.pack import Pack as Pack
    from omnitrain.data.packing.sample import Sample as Sample
    from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking as OmniDataCollatorWithPacking
    from omnitrain.data.render.processor import OmniProcessor as OmniProcessor
    from omnitrain.data.sources.rows import Row as Row
    from omnitrain.models.omni.build import build_foundation_model as build_foundation_model
    from omnitrain.models.omni.build import build_omni_model as build_omni_model
    from omnitrain.models.omni.generate import generate as generate
    from omnitrain.models.omni.model import OmniModel as OmniModel
    from omnitrain.ops.loss.linear import LossTerm as LossTerm
    from omnitrain.optim.gradients import clip_gradients as clip_gradients
    from omnitrain.parallel.parallelize import build_parallelize_model as build_parallelize_model
    from omnitrain.parallel.schedule.accumulate import accumulate_gradients as accumulate_gradients
    from omnitrain.parallel.sequence.head_exchange import gather_heads_scatter_seq as gather_heads_scatter_seq
    from omnitrain.parallel.sequence.head_exchange import gather_seq_scatter_heads as gather_seq_scatter_heads
    from omnitrain.parallel.state import get_parallel_state as get_parallel_state
    from omnitrain.parallel.state import init_parallel_state as init_parallel_state
    from omnitrain.parallel.step.plan import step_planner as step_planner
    from omnitrain.recipe import ComponentPlan as ComponentPlan
    from omnitrain.recipe import ParallelPlan as ParallelPlan
    from omnitrain.recipe import Recipe as Recipe
    from omnitrain.train.build_from_recipe import load_checkpoint as load_checkpoint
    from omnitrain.train.callbacks import Callback as Callback
    from omnitrain.train.evaluate.evaluate import heldout_loss as heldout_loss
    from omnitrain.train.own_loop import prepare as prepare
    from omnitrain.train.trainer import Trainer as Trainer
    from omnitrain.train.verbs.verify import verify as verify

__version__ = "0.2.0"

_MODULES = {  # a module with more names -> those that were at the top once
    "checkpoint": "load_optimizer save_optimizer",
    "data": "ChatRenderer MediaSpan Rejected TemplateRenderer Waveform open_sources pack_all",
    "models": "Answer OmniOutput merge_lora",
    "notebook": "RankError RankResults data_stats launch preview",
    "optim": "gradient_norm",
    "parallel": "ComponentLayout ModelLayout ParallelState VerifyReport VerifyRow layout_of",
    "recipe": "ChatFormat DataSource Layout Precision Sampling parse_layout",
}
_MOVED = {name: f"use ot.{module}.{name}" for module, names in _MODULES.items() for name in names.split()}
_NOT_NEEDED = "leave it out: ot.generate and ot.heldout_loss need no such call on any layout"
_GONE = dict.fromkeys(("gathered", "loss_peers", "serving"), _NOT_NEEDED)

warn_of_untested_versions()
_SHOWN_IN_NOTEBOOKS = {
    f"omnitrain.{name}": "omnitrain.report.notebook.as_html"
    for name in (
        "models.omni.model.OmniModel",
        "parallel.layout.ModelLayout",
        "parallel.layout.LayoutTable",
        "recipe.parallel.ParallelPlan",
    )
}
show_in_notebooks(_SHOWN_IN_NOTEBOOKS)
__all__ = [name for name in homes_in(__name__, __file__) if name not in _MODULES]
__getattr__ = on_first_use(__name__, __file__, _MOVED | _GONE, refusal=AttributeError)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
