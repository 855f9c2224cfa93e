"""Text tokenizers: loaded completely or not at all, and given texts in which nothing is a control token."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from omnitrain.errors import UserError

_SCRIPTS = "Hello WORLD 0123456789 +-=.,?! Привет γειά שלום مرحبا नमस्ते สวัสดี 你好 こんにちは 안녕"
_LEAST_SHARE = 0.5


def load_tokenizer(path: str | Path, key: str) -> PreTrainedTokenizerBase:
    """The text tokenizer of a folder or Hub id.

    Args:
        path: where it is.
        key: of the recipe that names it.

    Raises:
        UserError: none there, or one that is not whole (:func:`require_whole`).
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # each tokenizer class stumbles over missing or broken files in its own way
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{key}: no tokenizer at {str(path)!r}: {reason}") from None
    require_whole(tokenizer, path, key)
    return tokenizer


def require_whole(tokenizer: PreTrainedTokenizerBase, path: str | Path, key: str) -> None:
    """Refuse a tokenizer without a vocabulary, which transformers makes of a folder that lacks the tokenizer's files.

    A text in many scripts must become at least one token that is neither the unknown one nor an added one; if the
    vocabulary has none of these scripts, the first tokens of the vocabulary itself must.

    Args:
        tokenizer: as it was loaded.
        path: from where.
        key: of the recipe that names it.

    Raises:
        UserError: it makes nothing, or unknown tokens alone, of any text.
    """
    useless = {tokenizer.unk_token_id, *tokenizer.added_tokens_decoder}
    own = tokenizer.decode([one for one in range(min(len(tokenizer), 1000)) if one not in useless])
    if any(set(tokenizer(text, add_special_tokens=False)["input_ids"]) - useless for text in (_SCRIPTS, own)):
        return
    found = tokenizer(_SCRIPTS, add_special_tokens=False)["input_ids"]
    raise UserError(
        f"{key}: {str(path)!r} has no whole text tokenizer: the {type(tokenizer).__name__} from there "
        f"knows {len(tokenizer)} tokens and makes {found[:4] or 'no token'} of a text, as transformers builds an empty "
        "one where files are missing; put tokenizer.json (or the tokenizer's other files) there, or name a "
        "folder that has them (`model.tokenizer`, or `data.processor` for a processor or chat template)"
    )


def require_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, path: str) -> None:
    """Refuse a tokenizer with less than half as many tokens as a pretrained foundation has embeddings.

    Such a tokenizer is another model's, or lost a part. Embeddings that are padded have some per cent more rows than
    tokens (Phi-2's 51200 for 50295), and those with the codes of another medium still have text for the most part.

    Args:
        tokenizer: any.
        rows: of the embeddings.
        path: of the foundation.

    Raises:
        UserError: says both numbers.
    """
    if len(tokenizer) < _LEAST_SHARE * rows:
        raise UserError(
            f"model.tokenizer: {tokenizer.name_or_path!r} has {len(tokenizer)} tokens, and the pretrained foundation "
            f"at {path!r} has {rows} embeddings: the tokenizer is incomplete or another model's; name the one that the "
            "foundation was trained with (`model.tokenizer` or `data.processor`)"
        )


class TextEncoder:
    """Makes tokens of a text by anybody, in which control tokens that are spelled out stay text.

    Control tokens are a tokenizer's special tokens, and whatever added tokens a chat format is made of. Other added
    tokens, such as runs of blanks, are those of ordinary text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, format_texts: Iterable[str]) -> None:
        """Find the control tokens.

        Args:
            tokenizer: any.
            format_texts: by which a chat format sets messages and media apart.
        """
        of_format = {one for text in format_texts for one in tokenizer(text, add_special_tokens=False)["input_ids"]}
        added = {one: token for one, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        self._control = {one for one, token in added.items() if token.special or one in of_format}
        plain = [added[one].content for one in self._control if not added[one].special]
        if plain:  # only special tokens can be left to the text
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.add_tokens(plain, special_tokens=True)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """The ids of ``text``.

        Raises:
            ValueError: it spells a control token, and the tokenizer has no other tokens for that.
        """
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if found := self._control.intersection(ids):
            spelled = self._tokenizer.convert_ids_to_tokens(sorted(found))
            raise ValueError(f"the text spells control tokens, which the tokenizer cannot write as text: {spelled}")
        return ids
