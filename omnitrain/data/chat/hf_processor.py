"""Load HF processors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin
from transformers.processing_utils import AudioKwargs, ImagesKwargs, VideosKwargs
from transformers.utils import is_torchvision_available

from omnitrain.data.chat.text_tokenizer import require_whole
from omnitrain.errors import UserError
from omnitrain.packages import install_command
from omnitrain.recipe.suggest import hint


def load_hf_processor(path: str | Path) -> ProcessorMixin | PreTrainedTokenizerBase:
    """Load the processor of a folder or Hub id, or its tokenizer if it has no processor.

    Raises:
        UserError: there is no processor, a package that it needs is missing, or its tokenizer is incomplete.
    """
    try:
        processor = AutoProcessor.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        needs = "" if is_torchvision_available() else f"; many processors need torchvision: {install_command('vision')}"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"data.processor: cannot load a HF processor from {str(path)!r}: {reason}{needs}") from error
    if not isinstance(processor, (ProcessorMixin, PreTrainedTokenizerBase)):
        raise UserError(
            f"data.processor: {path!r} has a {type(processor).__name__}; expected a processor with a tokenizer"
        )
    require_whole(getattr(processor, "tokenizer", processor), path, "data.processor")
    return processor


# Group of arguments -> the processor's attribute that takes them, and the arguments that transformers documents.
_GROUPS: dict[str, tuple[str, Any]] = {
    "images_kwargs": ("image_processor", ImagesKwargs),
    "videos_kwargs": ("video_processor", VideosKwargs),
    "audio_kwargs": ("feature_extractor", AudioKwargs),
}


def require_known_arguments(processor: object, arguments: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise for arguments (by group) that the HF processor does not have; transformers would silently ignore them.

    Raises:
        UserError: an argument does not exist; the message suggests the nearest one.
    """
    for group, values in arguments.items():
        attribute, common = _GROUPS[group]
        typed_dict = getattr(getattr(processor, attribute, None), "valid_kwargs", None) or common
        known = typed_dict.__required_keys__ | typed_dict.__optional_keys__
        for name in values.keys() - known:
            raise UserError(f"data.processor_arguments.{group}.{name}: no such argument; {hint(name, known)}")
