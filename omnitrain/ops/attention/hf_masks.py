"""Read the mask functions that transformers composes: find their pattern, and restrict them to segments.

transformers describes a mask by a function of indices, composed from a few closures of ``masking_utils``: causal,
window, chunk, blocks of image tokens, packed sequences, joined by ``and_masks`` and ``or_masks``. We recognize closures
by their qualified names. We never guess at an unknown function, but evaluate it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import and_masks, or_masks

from omnitrain.errors import UserError
from omnitrain.ops.attention.spec import MaskFunction, MaskSpec, plain_spec, segment_starts


@dataclass(frozen=True)
class Pattern:
    """A mask that kernels support; all conditions hold at once."""

    causal: bool = False  # a token sees no later token
    window: int | None = None  # only tokens less than this many positions before it
    chunk: int | None = None  # only its chunk of this many tokens, counted from the start of its segment


def describe(mask_function: MaskFunction, offsets: tuple[int, ...], use_vmap: bool, device: torch.device) -> MaskSpec:
    """Return the spec of a sequence packed at ``offsets`` ``(0, ..., T)`` in a model with the mask ``mask_function``.

    Raises UserError: a function that the model added both counts from the sequence's start and looks up tokens, so its
    meaning inside a segment is unknown.
    """
    pattern = pattern_of(mask_function, offsets)
    if pattern is None or (pattern.window is not None and not pattern.causal):
        function = within_segments(mask_function, segment_starts(offsets, device))
        return MaskSpec(offsets, general=function, use_vmap=use_vmap)
    if pattern.chunk is not None:
        offsets = _cut(offsets, pattern.chunk)
    return plain_spec(offsets, pattern.causal, pattern.window)


def pattern_of(function: MaskFunction, offsets: tuple[int, ...]) -> Pattern | None:
    """Return the pattern of ``function`` within each segment; None: kernels do not support it."""
    name, captured = _name(function), _captured(function)
    if name == "causal_mask_function":
        return Pattern(causal=True)
    if name == "bidirectional_mask_function":
        return Pattern()
    if name == "sliding_window_overlay":
        return Pattern(window=captured["sliding_window"])
    if name == "chunked_overlay":
        return Pattern(chunk=captured["chunk_size"])
    if name == "packed_sequence_mask_function":
        numbers = captured["packed_sequence_mask"]
        covers = numbers.size(1) == offsets[-1]  # not only a slice of the sequence
        starts = segment_starts(offsets, numbers.device)
        return Pattern() if covers and bool((numbers == numbers[:, starts]).all()) else None
    if name == "and_masks":
        return _all([pattern_of(f, offsets) for f in captured[_PARTS]])
    if name == "or_masks":
        patterns = [pattern_of(f, offsets) for f in captured[_PARTS]]
        return Pattern() if Pattern() in patterns else patterns[0] if len(set(patterns)) == 1 else None
    return None


def is_causal(function: MaskFunction) -> bool:
    """Whether any part of ``function`` is the causal mask."""
    nested = (value for value in _flat(_captured(function).values()) if callable(value))
    return _name(function) == "causal_mask_function" or any(is_causal(value) for value in nested)


def within_segments(function: MaskFunction, starts: Tensor) -> MaskFunction:
    """Return ``function`` as it would be for each segment alone, over indices of the sequence; exact within segments.

    Functions that look up tokens (image blocks) keep these indices. Functions that count (chunks) get indices that
    start at 0 in each segment, from the ``starts`` ``[T]`` of the tokens' segments.
    """
    name, captured = _name(function), _captured(function)
    if name in ("and_masks", "or_masks"):
        parts = (within_segments(part, starts) for part in captured[_PARTS])
        return and_masks(*parts) if name == "and_masks" else or_masks(*parts)
    if name in _COUNTING or (name is None and not _looks_up_tokens(function, len(starts))):
        return partial(_from_start, function, starts)
    return function


_PARTS = "mask_functions"

# Functions of masking_utils that depend only on differences of indices, or on indices from a sample's start.
_COUNTING = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
}


def _name(function: MaskFunction) -> str | None:
    """The public function of ``masking_utils`` that is ``function`` or made it; None: another module made it."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    return function.__qualname__.split(".")[0]


def _captured(function: MaskFunction) -> dict[str, Any]:
    """Name -> value of a function's closure, and of a partial's arguments."""
    if isinstance(function, partial):
        bound = {f"argument {index}": value for index, value in enumerate(function.args)}
        return {**bound, **function.keywords, **_captured(function.func)}
    if not isinstance(function, FunctionType):
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _all(patterns: list[Pattern | None]) -> Pattern | None:
    known = [pattern for pattern in patterns if pattern is not None]
    chunks = {pattern.chunk for pattern in known if pattern.chunk is not None}
    if len(known) < len(patterns) or len(chunks) > 1:
        return None
    window = min((pattern.window for pattern in known if pattern.window is not None), default=None)
    return Pattern(any(pattern.causal for pattern in known), window, next(iter(chunks), None))


def _cut(offsets: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    """``offsets`` with an additional one at every ``chunk`` tokens of a segment."""
    return (0, *(cut for start, stop in pairwise(offsets) for cut in (*range(start + chunk, stop, chunk), stop)))


def _from_start(function: MaskFunction, starts: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return function(batch, head, query - starts[query], key - starts[key])


def _looks_up_tokens(function: MaskFunction, num_tokens: int) -> bool:
    """Whether a function from another module holds a tensor with an entry per token of the sequence."""
    captured = list(_flat(_captured(function).values()))
    nested = [value for value in captured if callable(value)]
    held = [*captured, *(deeper for value in nested for deeper in _flat(_captured(value).values()))]
    by_token = any(isinstance(value, Tensor) and num_tokens in value.shape for value in held)
    callables = [function, *(value for value in held if callable(value))]
    readable = all(isinstance(value, (FunctionType, partial)) for value in callables)
    if not readable or len(callables) > 1 + len(nested) or (nested and by_token):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise UserError(
            f"the mask function {name} is more than a lookup or a count, so its meaning for a sample inside a packed "
            "sequence is unknown: this model cannot be packed"
        )
    return by_token


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value
