"""Load complete text tokenizers, and encode texts in which control tokens stay text."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin
from transformers.processing_utils import AudioKwargs, ImagesKwargs, VideosKwargs
from transformers.utils import is_torchvision_available

from omnitrain.errors import UserError
from omnitrain.packages import install_command
from omnitrain.recipe.suggest import hint

_SCRIPTS = "Hello WORLD 0123456789 +-=.,?! Привет γειά שלום مرحبا नमस्ते สวัสดี 你好 こんにちは 안녕"
_MIN_SHARE = 0.5


def load_tokenizer(path: str | Path, key: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer that ``key`` of the recipe names; UserError: none, or an incomplete one."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # each tokenizer class fails differently on missing or broken files
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{key}: no tokenizer at {str(path)!r}: {reason}") from None
    require_whole(tokenizer, path, key)
    return tokenizer


def require_whole(tokenizer: PreTrainedTokenizerBase, path: str | Path, key: str) -> None:
    """Raise UserError for a tokenizer without a vocabulary, which transformers builds if its files are missing.

    A text in many scripts, or else of its first tokens, must give a token that is not unknown or added. ``key``: of the
    recipe.
    """
    useless = {tokenizer.unk_token_id, *tokenizer.added_tokens_decoder}
    vocabulary = tokenizer.decode([one for one in range(min(len(tokenizer), 1000)) if one not in useless])
    if any(set(tokenizer(text, add_special_tokens=False)["input_ids"]) - useless for text in (_SCRIPTS, vocabulary)):
        return
    ids = tokenizer(_SCRIPTS, add_special_tokens=False)["input_ids"]
    raise UserError(
        f"{key}: {str(path)!r} has no complete text tokenizer: its {type(tokenizer).__name__} has {len(tokenizer)} "
        f"tokens and encodes a text as {ids[:4] or 'no token'}; transformers builds such an empty tokenizer if files "
        "are missing. Add tokenizer.json (or the tokenizer's other files) to the folder, or use a folder that has "
        "them (`model.tokenizer`, or `data.processor` for a processor or chat template)"
    )


def require_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, path: str) -> None:
    """Raise UserError for a tokenizer with less than half as many tokens as the foundation at ``path`` has rows.

    Padded embeddings have some per cent more rows than tokens, and vocabularies with codes of media are mostly text.
    """
    if len(tokenizer) < _MIN_SHARE * rows:
        raise UserError(
            f"model.tokenizer: {tokenizer.name_or_path!r} has {len(tokenizer)} tokens, but the pretrained foundation "
            f"at {path!r} has {rows} embeddings: the tokenizer is incomplete or belongs to another model; use the one "
            "that the foundation was trained with (`model.tokenizer` or `data.processor`)"
        )


class TextEncoder:
    """Encodes untrusted text, in which spelled special tokens, and tokens of the chat format, stay text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, format_texts: Iterable[str]) -> None:
        """Find the control tokens. ``format_texts`` of the chat format delimit messages and media."""
        of_format = {one for text in format_texts for one in tokenizer(text, add_special_tokens=False)["input_ids"]}
        added = {one: token for one, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        self._control = {one for one, token in added.items() if token.special or one in of_format}
        plain = [added[one].content for one in self._control if not added[one].special]
        if plain:  # `split_special_tokens` splits only special tokens
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.add_tokens(plain, special_tokens=True)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Return the ids of ``text``; ValueError: it spells a control token that cannot be encoded as text."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if found := self._control.intersection(ids):
            spelled = self._tokenizer.convert_ids_to_tokens(sorted(found))
            raise ValueError(f"the text spells control tokens, which the tokenizer cannot write as text: {spelled}")
        return ids


def load_hf_processor(path: str | Path) -> ProcessorMixin | PreTrainedTokenizerBase:
    """Load the processor of a folder or Hub id, or else its tokenizer; UserError: neither can be loaded."""
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
    """Raise UserError for arguments (by group) that transformers' processor would ignore."""
    for group, values in arguments.items():
        attribute, common = _GROUPS[group]
        typed_dict = getattr(getattr(processor, attribute, None), "valid_kwargs", None) or common
        known = typed_dict.__required_keys__ | typed_dict.__optional_keys__
        for name in values.keys() - known:
            raise UserError(f"data.processor_arguments.{group}.{name}: no such argument; {hint(name, known)}")
