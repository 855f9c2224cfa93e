"""``OmniModel``: HuggingFace encoders, a foundation model and decoders as one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnitrain.exports import on_first_use

if TYPE_CHECKING:
    from omnitrain.models.adapters.lora import merge_lora
    from omnitrain.models.components.outputs import OmniOutput
    from omnitrain.models.omni.build import build_foundation_model, build_omni_model
    from omnitrain.models.omni.generate import Answer
    from omnitrain.models.omni.model import OmniModel

__all__ = ["Answer", "OmniModel", "OmniOutput", "build_foundation_model", "build_omni_model", "merge_lora"]

_PRETRAINED = "use transformers' {}.from_pretrained(path), or ot.OmniProcessor for rows of messages"
_SAVED = "call model.save_pretrained(folder) on all ranks, and processor.save_pretrained(folder) on one"

__getattr__ = on_first_use(
    __name__,
    __file__,
    {  # what VeOmni's package of this name has besides
        "build_tokenizer": _PRETRAINED.format("AutoTokenizer"),
        "build_processor": _PRETRAINED.format("AutoProcessor"),
        "build_omni_processor": "use ot.OmniProcessor(renderer, *model.media_adapters())",
        "load_model_weights": "pass weights_path to ot.build_parallelize_model",
        "save_model_weights": _SAVED,
        "save_model_assets": _SAVED,
    },
)
