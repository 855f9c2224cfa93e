"""Samples that fit into a pack: a row that is too long is rejected, or its conversation split between turns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from omnitrain.data.chat.parts import Message, media_parts
from omnitrain.data.packing.budget import PackBudget
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.sources.rows import Row
from omnitrain.recipe.data import Overlong

_HEAD_ROLES = ("system", "developer")


def sample_within(
    processor: OmniProcessor,
    row: Row,
    budget: PackBudget | None,
    overlong: Overlong = "drop",
    *,
    without_tail: bool = False,
    may_ask: bool = False,
    dropped: Collection[str] = (),
) -> Sample | Rejected:
    """Return the sample of a row, the first of several, or why it is rejected; further arguments as of ``processor``.

    A conversation that exceeds the budget (None: no limit) with ``split`` is cut between turns into as few samples as
    possible, from its begin on. Each has the system message and the media of its own turns. A piece of which nothing is
    trained is left out.

    Raises:
        UserError: the model cannot use such rows at all.
    """
    prepare = partial(_sample, processor, budget=budget, without_tail=without_tail, dropped=dropped)
    sample = prepare(row, may_ask=may_ask)
    if overlong == "split" and isinstance(sample, Rejected) and sample.is_overlong:
        return _split(row, partial(prepare, may_ask=True))  # another piece has what is trained
    return sample


def _sample(processor: OmniProcessor, row: Row, *, budget: PackBudget | None, **options: Any) -> Sample | Rejected:
    sample = processor.sample(row, max_tokens=None if budget is None else budget.tokens, **options)
    if isinstance(sample, Sample) and budget is not None and (reason := budget.excess(sample)):
        return Rejected(row.id, row.source, reason, is_overlong=True)
    return sample


def _split(row: Row, prepare: Callable[[Row], Sample | Rejected]) -> Sample | Rejected:
    """Return the first piece of a conversation, which has the others; or the reason why it cannot be split."""
    head, turns = _head_and_turns(row.messages)
    media = _media_by_message(row)

    def piece(start: int, stop: int) -> Sample | Rejected:
        indices = [*head, *(index for turn in turns[start:stop] for index in turn)]
        shown: dict[str, list[Any]] = {}
        for modality, value in (file for index in indices for file in media[index]):
            shown.setdefault(modality, []).append(value)
        return prepare(replace(row, messages=[row.messages[index] for index in indices], media=shown))

    pieces: list[Sample] = []
    start = 0
    while start < len(turns):
        found, fits, too_many = piece(start, start + 1), start + 1, len(turns) + 1
        if isinstance(found, Rejected):
            return replace(found, reason=f"turn {start + 1} of {len(turns)} alone: {found.reason}")
        while too_many - fits > 1:
            stop = (fits + too_many) // 2
            longer = piece(start, stop)
            if isinstance(longer, Sample):
                found, fits = longer, stop
            elif longer.is_overlong:
                too_many = stop
            else:
                return longer
        pieces += [found] * found.is_trained
        start = fits
    numbered = [replace(one, piece=number, num_pieces=len(pieces)) for number, one in enumerate(pieces)]
    return replace(numbered[0], more=tuple(numbered[1:]))


def _head_and_turns(messages: Sequence[Message]) -> tuple[list[int], list[list[int]]]:
    """Return the indices of the first system messages, and of each turn, which begins with user messages."""
    roles = [message["role"] for message in messages]
    num_head = next((index for index, role in enumerate(roles) if role not in _HEAD_ROLES), len(roles))
    turns: list[list[int]] = []
    for index in range(num_head, len(roles)):
        if not turns or (roles[index] == "user" and roles[index - 1] != "user"):
            turns.append([])
        turns[-1].append(index)
    return list(range(num_head)), turns


def _media_by_message(row: Row) -> list[list[tuple[str, Any]]]:
    """Return the modality and file of each medium that a message shows, in order."""
    files = {modality: iter(values) for modality, values in row.media.items()}
    return [
        [(part.modality, next(files[part.modality])) for part in media_parts([message])] for message in row.messages
    ]
