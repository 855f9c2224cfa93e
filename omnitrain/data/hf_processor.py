"""Reads HF processors."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import is_torchvision_available

from omnitrain.errors import UserError


def load_hf_processor(path: str | Path) -> ProcessorMixin | PreTrainedTokenizerBase:
    """The processor of a folder or Hub id; its tokenizer where it has no more.

    Raises:
        UserError: none there, or a package that it needs is missing.
    """
    try:
        processor = AutoProcessor.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        hint = "" if is_torchvision_available() else "; many processors need torchvision: pip install torchvision"
        first_line = str(error).splitlines()[0]
        raise UserError(
            f"data.processor: no HF processor can be read from {str(path)!r}: {first_line}{hint}"
        ) from error
    if not isinstance(processor, (ProcessorMixin, PreTrainedTokenizerBase)):
        raise UserError(f"data.processor: {path!r} holds a {type(processor).__name__}, expected one with a tokenizer")
    return processor
