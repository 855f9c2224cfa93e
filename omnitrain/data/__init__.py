"""Rows -> samples -> packs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnitrain.exports import on_first_use

if TYPE_CHECKING:
    from omnitrain.data.loading.loader import build_dataloader
    from omnitrain.data.packing.budget import pack_all
    from omnitrain.data.packing.pack import Pack
    from omnitrain.data.packing.sample import MediaSpan, Rejected
    from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking
    from omnitrain.data.render.processor import OmniProcessor
    from omnitrain.data.render.renderer import ChatRenderer
    from omnitrain.data.render.template_renderer import TemplateRenderer
    from omnitrain.data.sources.media import Waveform
    from omnitrain.data.sources.rows import open_sources

__all__ = [
    "ChatRenderer",
    "MediaSpan",
    "OmniDataCollatorWithPacking",
    "OmniProcessor",
    "Pack",
    "Rejected",
    "TemplateRenderer",
    "Waveform",
    "build_dataloader",
    "open_sources",
    "pack_all",
]

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
