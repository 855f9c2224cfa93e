"""What it means that a model trains as plain transformers would train it; every function returns what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from omnitrain.data.pack import Pack
from tests.models.plain import (
    Pair,
    exact_gradients,
    our_logits,
    our_step,
    plain_logits,
    plain_logits_of_items_apart,
    plain_step,
)

TOLERANCE = 1e-5
NOISE_FACTOR = 20
_FALLS_WITH_PRECISION = 1e-6
"""fp64 rounds 2e-9 times as much as fp32: below this, a gradient in fp64 is nothing but rounding."""


def differences(both: Pair) -> dict[str, float]:
    """All that is wrong with a model: name -> error. Packed samples count only where the contract packs."""
    packs = both.ours.runner.contract.packs
    wrong = unpacked_errors(both) | gradient_errors(both, [both.pack()] if packs else both.packs_of_one())
    return wrong | packed_errors(both) if packs else wrong


def unpacked_errors(both: Pair) -> dict[str, float]:
    """Samples of which a single bit of the logits differs from plain transformers'.

    Media of one sample may share a call of the tower, or not. Where that changes a bit in plain transformers itself,
    because a matrix product rounds otherwise with more rows, or sdpa with keys that a mask leaves out, the bits must be
    those of plain transformers with each item by itself, and stay within 1e-5 of those with all items in one call.
    """
    wrong = {}
    for probe, pack in zip(both.probes, both.packs_of_one(), strict=True):
        together = plain_logits(both.plain, probe)[0]
        got = our_logits(both.ours, pack)[probe.sample.index]
        if torch.equal(got, together):
            continue
        error = _relative(got, together)
        is_rounding = len(probe.modalities) > 1 and error <= TOLERANCE
        if not (is_rounding and torch.equal(got, plain_logits_of_items_apart(both, probe)[0])):
            wrong[f"logits of {' and '.join(probe.modalities) or 'text'}, {len(probe.sample)} tokens"] = error
    return wrong


def packed_errors(both: Pair) -> dict[str, float]:
    """Samples whose logits in one row with all others differ from those alone by more than 1e-5 of the largest."""
    together = our_logits(both.ours, both.pack())
    alone = [item for pack in both.packs_of_one() for item in our_logits(both.ours, pack).items()]
    errors = {f"packed sample {index}": _relative(together[index], logits) for index, logits in alone}
    return {name: error for name, error in errors.items() if not error <= TOLERANCE}


def gradient_errors(both: Pair, packs: Sequence[Pack]) -> dict[str, float]:
    """Loss, and tensors whose gradient is not plain transformers', with errors relative to the tensor's largest value.

    A tensor may differ by max(1e-5, 20 x its noise); the noise is what plain transformers differs by from itself when
    the samples are added in the other order.

    Some gradients are zero (a key bias without rotary positions: it adds the same to every score of a query). What fp32
    leaves of them is the rounding of large values that cancel; the order of the samples does not show it. A run of plain
    transformers in fp64 does: such a gradient falls with the precision, to less than a millionth of what it is in fp32.
    It may differ from fp64's by 20 x what plain transformers' own fp32 gradient differs by, and no other tensor may.
    """
    order = range(len(both.probes))
    loss, expected = plain_step(both, order)
    _, reordered = plain_step(both, order[::-1])
    our_loss, got = our_step(both, packs)
    wrong = {} if abs(our_loss - loss) <= TOLERANCE * abs(loss) else {"loss": abs(our_loss - loss) / abs(loss)}
    for name, one, other, again in _aligned(got, expected, reordered):
        error, noise = _relative(one, other), _relative(again, other)
        if not error <= max(TOLERANCE, NOISE_FACTOR * noise):
            wrong[name] = error
    return without_rounding(wrong, got, expected, exact_gradients(both)) if wrong else wrong


def without_rounding(
    wrong: dict[str, float], got: dict[str, Tensor], expected: dict[str, Tensor], exact: dict[str, Tensor]
) -> dict[str, float]:
    """Those that are wrong even if their exact gradient is zero."""
    kept = dict(wrong)
    for name, ours, plain, true in _aligned(got, expected, exact):
        rounding = float((plain - true).abs().max())
        vanishes = float(true.abs().max()) <= _FALLS_WITH_PRECISION * rounding
        if name in kept and vanishes and float((ours - true).abs().max()) <= NOISE_FACTOR * rounding:
            del kept[name]
    return kept


def _aligned(*gradients: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """``(name, one tensor of each)``; a tensor that got no gradient is zero."""
    for name in dict.fromkeys(name for found in gradients for name in found):
        one, other, third = (found.get(name, torch.zeros(1)) for found in gradients)
        yield name, one, other, third


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)
