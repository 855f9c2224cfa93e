"""Rows -> samples -> packs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnitrain.exports import on_first_use

if TYPE_CHECKING:
    from omnitrain.data.loading.loader import build_dataloader
    from omnitrain.data.packing.pack import Pack
    from omnitrain.data.render.packing_collator import OmniDataCollatorWithPacking
    from omnitrain.data.render.processor import OmniProcessor
    from omnitrain.data.sources.rows import open_sources

__all__ = ["OmniDataCollatorWithPacking", "OmniProcessor", "Pack", "build_dataloader", "open_sources"]

_ROWS = "use ot.open_sources([ot.DataSource(path=...)])[0], or any dataset of torch or HF `datasets`"
_TEMPLATE = "use ot.TemplateRenderer(AutoProcessor.from_pretrained(path), model.native_inputs) in an ot.OmniProcessor"
_PACKED = "use OmniDataCollatorWithPacking(model.native_inputs): packs have no padding"
_SHARDED = "leave it out: ot.step_planner(model) divides the packs of all ranks, sequences included"

__getattr__ = on_first_use(
    __name__,
    {
        "OmniDataCollatorWithPacking": "omnitrain.data.render.packing_collator",
        "OmniProcessor": "omnitrain.data.render.processor",
        "Pack": "omnitrain.data.packing.pack",
        "build_dataloader": "omnitrain.data.loading.loader",
        "open_sources": "omnitrain.data.sources.rows",
    },
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
