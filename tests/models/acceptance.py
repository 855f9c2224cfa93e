"""Checks that a model trains as it does in plain transformers; every function returns the differences."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from omnitrain.data.packing.pack import Pack
from omnitrain.models.contract.samples import Probe
from omnitrain.ops.config_value import config_value
from tests.models.plain import (
    Pair,
    exact_logits,
    exact_step,
    our_logits,
    our_step,
    plain_logits,
    plain_logits_of_items_apart,
    plain_step,
)

_Key = TypeVar("_Key", bound=Hashable)

TOLERANCE = 1e-5
NOISE_FACTOR = 20
ROUNDING_FACTOR = 4
"""Two fp32 computations of one number differ from it by about as much; the worst ratio measured is 2.8."""
REST_OF_ROUNDING = 1e-6
"""What fp64 leaves of a difference that is rounding: a 2**-29th, 2e-9, and more where the path to it differs."""


def differences(both: Pair) -> dict[str, float]:
    """All that is wrong with a model: name -> error. Packed samples count only where the contract packs."""
    packs = both.ours.runner.contract.packs
    wrong = unpacked_errors(both) | gradient_errors(both, [both.pack()] if packs else both.packs_of_one())
    return wrong | packed_errors(both) if packs else wrong


def unpacked_errors(both: Pair) -> dict[str, float]:
    """Samples, each alone and unpacked, of which a single bit of the logits differs from plain transformers'.

    Items of one sample may share a call of their tower, or not. Where that changes a bit in plain transformers itself,
    because a matrix product rounds otherwise with more rows, or sdpa with keys that a mask leaves out, the bits must be
    those of plain transformers with each item by itself, and stay within 1e-5 of those with all items in one call.
    """
    wrong = _bitwise_errors(both, packed=False)
    return {_named(p): wrong[p.sample.index] for p in both.probes if p.sample.index in wrong}


def pack_of_one_errors(both: Pair) -> dict[str, float]:
    """The same for packed sequences of one sample, whose attention is another backend's.

    Layers of llama4 attend in chunks. Plain transformers masks the keys of the other chunks, we run each chunk by
    itself, which adds in another order. So a sample of several chunks is held against fp64, as in
    :func:`gradient_errors`; all others must have the same bits.
    """
    wrong = _bitwise_errors(both, packed=True)
    chunk = config_value(both.plain.config.get_text_config(), "attention_chunk_size") or math.inf
    in_chunks = {
        p.sample.index: wrong[p.sample.index] for p in both.probes if len(p.sample) > chunk and p.sample.index in wrong
    }
    if in_chunks:
        got = {index: rows for pack in both.packs_of_one() for index, rows in our_logits(both.ours, pack).items()}
        plain = {probe.sample.index: plain_logits(both.plain, probe)[0] for probe in both.probes}
        beyond = beyond_rounding(in_chunks, got, plain, exact_logits(both))
        wrong = {index: error for index, error in wrong.items() if index not in in_chunks} | beyond
    return {_named(p): wrong[p.sample.index] for p in both.probes if p.sample.index in wrong}


def _bitwise_errors(both: Pair, *, packed: bool) -> dict[int, float]:
    wrong = {}
    for probe, pack in zip(both.probes, both.packs_of_one(), strict=True):
        together = plain_logits(both.plain, probe)[0]
        got = our_logits(both.ours, pack, packed=packed)[probe.sample.index]
        if torch.equal(got, together):
            continue
        error = _relative(got, together)
        is_rounding = len(probe.modalities) > 1 and error <= TOLERANCE
        if not (is_rounding and torch.equal(got, plain_logits_of_items_apart(both, probe)[0])):
            wrong[probe.sample.index] = error
    return wrong


def packed_errors(both: Pair) -> dict[str, float]:
    """Samples whose logits in one pack are not those of plain transformers alone: 1e-5 of the largest.

    A sample beyond that is held against fp64, as in :func:`gradient_errors`.
    """
    got = our_logits(both.ours, both.pack())
    plain = {probe.sample.index: plain_logits(both.plain, probe)[0] for probe in both.probes}
    wrong = {index: error for index in got if not (error := _relative(got[index], plain[index])) <= TOLERANCE}
    if wrong:
        wrong = beyond_rounding(wrong, got, plain, exact_logits(both))
    return {f"packed, {_named(p)}": wrong[p.sample.index] for p in both.probes if p.sample.index in wrong}


def _named(probe: Probe) -> str:
    return f"logits of {' and '.join(probe.modalities) or 'text'}, {len(probe.sample)} tokens"


def gradient_errors(both: Pair, packs: Sequence[Pack]) -> dict[str, float]:
    """Loss, and tensors whose gradient is not plain transformers', with errors relative to the tensor's largest value.

    A tensor may differ by max(1e-5, 20 x its noise); the noise is what plain transformers differs by from itself when
    the samples are added in the other order.

    That noise lacks what one sample's forward and backward round. In most tensors it is far below 1e-5. It is all there
    is of a gradient that is zero in exact arithmetic (a key bias without rotary positions adds the same to every score
    of a query), and a recurrence multiplies it. So a tensor beyond that bound is held against plain transformers in
    fp64: it may be at most 4 x as far from that as plain transformers in fp32 is itself.
    """
    return step_errors(both, *our_step(both, packs))


def step_errors(both: Pair, our_loss: float, got: dict[str, Tensor]) -> dict[str, float]:
    """The same of a loss and gradients that were computed elsewhere."""
    order = range(len(both.probes))
    loss, expected = plain_step(both, order)
    _, reordered = plain_step(both, order[::-1])
    wrong = {} if abs(our_loss - loss) <= TOLERANCE * abs(loss) else {"loss": abs(our_loss - loss) / abs(loss)}
    for name, one, other, again in _aligned(got, expected, reordered):
        error, noise = _relative(one, other), _relative(again, other)
        if not error <= max(TOLERANCE, NOISE_FACTOR * noise):
            wrong[name] = error
    if not wrong:
        return wrong
    exact_loss, exact = exact_step(both)
    if not abs(exact_loss - loss) <= TOLERANCE * abs(loss):  # other experts were chosen: this is not about rounding
        return wrong
    return beyond_rounding(wrong, got, expected, exact)


def staying_in_fp64(
    wrong: dict[str, float], got: dict[str, Tensor], in_fp64: dict[str, Tensor], exact: dict[str, Tensor]
) -> dict[str, float]:
    """Those of ``wrong`` that rounding does not explain: computed in fp64, they are still off.

    Sharded matrix products sum in another order, so every product rounds differently. A recurrence multiplies these
    differences, and a gradient that is zero in exact arithmetic consists of nothing else. In fp64 rounding is
    tiny, while a true error keeps its size.

    Args:
        wrong: name -> error of a step in fp32.
        got: the gradients of that step.
        in_fp64: those of the same step in the same layout, in fp64.
        exact: those of plain transformers, in fp64.
    """
    rounding = {
        key
        for key, narrow, wide, true in _aligned(got, in_fp64, exact)
        if (wide - true).abs().max() <= REST_OF_ROUNDING * (narrow - true).abs().max()
    }
    return {name: error for name, error in wrong.items() if name not in rounding}


def beyond_rounding(
    wrong: dict[_Key, float], got: dict[_Key, Tensor], expected: dict[_Key, Tensor], exact: dict[_Key, Tensor]
) -> dict[_Key, float]:
    """Those of ``wrong`` that are further from ``exact`` than 4 x what ``expected`` is."""
    excused = {
        key
        for key, ours, plain, true in _aligned(got, expected, exact)
        if (ours - true).abs().max() <= ROUNDING_FACTOR * (plain - true).abs().max()
    }
    return {key: error for key, error in wrong.items() if key not in excused}


def _aligned(*tensors: dict[_Key, Tensor]) -> Iterator[tuple[_Key, Tensor, Tensor, Tensor]]:
    """``(key, one tensor of each)``; a tensor that is missing, such as a gradient that never came, is zero."""
    for key in dict.fromkeys(key for found in tensors for key in found):
        one, other, third = (found.get(key, torch.zeros(1)) for found in tensors)
        yield key, one, other, third


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)
