"""Reads HF processors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin
from transformers.processing_utils import AudioKwargs, ImagesKwargs, VideosKwargs
from transformers.utils import is_torchvision_available

from omnitrain.data.text_tokenizer import require_whole
from omnitrain.errors import UserError
from omnitrain.recipe.suggest import hint


def load_hf_processor(path: str | Path) -> ProcessorMixin | PreTrainedTokenizerBase:
    """The processor of a folder or Hub id; its tokenizer where it has no more.

    Raises:
        UserError: none there, a package that it needs is missing, or its tokenizer is not whole.
    """
    try:
        processor = AutoProcessor.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        remedy = "" if is_torchvision_available() else "; many processors need torchvision: pip install torchvision"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"data.processor: no HF processor can be read from {str(path)!r}: {reason}{remedy}") from error
    if not isinstance(processor, (ProcessorMixin, PreTrainedTokenizerBase)):
        raise UserError(f"data.processor: {path!r} holds a {type(processor).__name__}, expected one with a tokenizer")
    require_whole(getattr(processor, "tokenizer", processor), path, "data.processor")
    return processor


# Arguments by part of a processor -> the attribute that holds the part, and what transformers documents for any such.
_PARTS: dict[str, tuple[str, Any]] = {
    "images_kwargs": ("image_processor", ImagesKwargs),
    "videos_kwargs": ("video_processor", VideosKwargs),
    "audio_kwargs": ("feature_extractor", AudioKwargs),
}


def require_known_arguments(processor: object, arguments: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse arguments that a part of a HF processor does not know; transformers would leave them out.

    Args:
        processor: of transformers.
        arguments: ``images_kwargs``, ``videos_kwargs`` or ``audio_kwargs`` -> argument -> value.

    Raises:
        UserError: names the argument, and the nearest one that there is.
    """
    for part, given in arguments.items():
        attribute, common = _PARTS[part]
        own = getattr(getattr(processor, attribute, None), "valid_kwargs", None) or common
        known = own.__required_keys__ | own.__optional_keys__
        for name in given.keys() - known:
            raise UserError(f"data.processor_arguments.{part}.{name}: no such argument; {hint(name, known)}")
