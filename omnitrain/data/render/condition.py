"""Conversations without their condition: what guidance compares with, and what `data.condition_dropout` trains."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from omnitrain.data.chat.parts import Message, content_parts, media_parts
from omnitrain.data.sources.rows import MODALITIES, Row
from omnitrain.recipe.data import ConditionDropout

CONDITION = frozenset({"text", *MODALITIES})
_STREAM = 1  # of random numbers: other users of seed and index draw others


def without_condition(row: Row, messages: Sequence[Message], kinds: Collection[str]) -> tuple[Row, list[Message]]:
    """Return a row and its messages; all but the assistant's have lost parts of ``kinds``; ``text``: tools, too."""
    kept = [part for part in media_parts(list(messages)) if part.is_target or part.modality not in kinds]
    media = {
        modality: [file for part in kept if part.modality == modality for file in files[part.position :][:1]]
        for modality, files in row.media.items()
    }
    row = replace(row, media=media, tools=None if "text" in kinds else row.tools)
    return row, [one if one["role"] == "assistant" else _without(one, kinds) for one in messages]


def _without(message: Message, kinds: Collection[str]) -> Message:
    return message | {"content": [part for part in content_parts(message) if part["type"] not in kinds] or ""}


def dropped_kinds(dropout: ConditionDropout, seed: int, index: int) -> frozenset[str]:
    """Return what the sample of a position in the global data order loses: a function of its arguments alone."""
    if dropout == ConditionDropout():
        return frozenset()
    whole, *draws = np.random.default_rng((seed, index, _STREAM)).random(1 + len(CONDITION)).tolist()
    kinds = zip(sorted(CONDITION), draws, strict=True)
    lost = {kind for kind, draw in kinds if whole < dropout.whole or draw < getattr(dropout, kind)}
    return frozenset(lost)
