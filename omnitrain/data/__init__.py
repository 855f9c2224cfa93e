"""Rows -> samples -> packs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnitrain.exports import homes_in, on_first_use

if TYPE_CHECKING:
    from omnitrain.data.loading.loader import build_dataloader as build_dataloader
    from omnitrain.data.packing.budget import pack_all as pack_all
    from omnitrain.data.packing.pack import Pack as Pack
    from omnitrain.data.packing.sample import MediaSpan as MediaSpan
    from omnitrain.data.packing.sample import Rejected as Rejected
    from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking as OmniDataCollatorWithPacking
    from omnitrain.data.render.processor import OmniProcessor as OmniProcessor
    from omnitrain.data.render.renderer import ChatRenderer as ChatRenderer
    from omnitrain.data.render.template_renderer import TemplateRenderer as TemplateRenderer
    from omnitrain.data.sources.clips import Clip as Clip
    from omnitrain.data.sources.media import Waveform as Waveform
    from omnitrain.data.sources.rows import open_sources as open_sources

__all__ = list(homes_in(__name__, __file__))

_ROWS = "use ot.data.open_sources([ot.recipe.DataSource(path=...)])[0], or any dataset of torch or HF `datasets`"
_TEMPLATE = (
    "use ot.data.TemplateRenderer(AutoProcessor.from_pretrained(path), model.native_inputs) in an ot.OmniProcessor"
)
_PACKED = "use OmniDataCollatorWithPacking(model.native_inputs): packs have no padding"
_SHARDED = "leave it out: ot.step_planner(model) divides the packs of all ranks, sequences included"

__getattr__ = on_first_use(
    __name__,
    __file__,
    {  # what VeOmni's package of this name has, or had, besides
        "build_dataset": _ROWS,
        "build_mapping_dataset": _ROWS,
        "build_iterative_dataset": _ROWS,
        "build_chat_template": _TEMPLATE,
        "build_multimodal_chat_template": _TEMPLATE,
        "build_data_transform": _TEMPLATE,
        "DataCollatorWithPacking": _PACKED,
        "DataCollatorWithPadding": _PACKED,
        "DataCollatorWithPositionIDs": _PACKED,
        "MainCollator": _PACKED,
        "OmniDataCollatorWithPadding": _PACKED,
        "OmniSequenceShardCollator": _SHARDED,
        "TextSequenceShardCollator": _SHARDED,
    },
)
