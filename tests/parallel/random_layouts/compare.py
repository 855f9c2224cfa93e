"""Compare a row on its ranks with plain transformers, under a bound from rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from omnitrain.parallel.spawn.pool import RankError, RankPool
from tests.parallel.random_layouts.models import Example, bare, examples_of, kinds_of, samples_in
from tests.parallel.random_layouts.on_ranks import Mutant, train
from tests.parallel.random_layouts.reference import Outcome, Reference
from tests.parallel.random_layouts.rows import STEPS, Row

FACTOR = 10.0
"""A layout may differ by so many times what one process changes by if each weight moves to a neighbouring number."""
RELATIVE, ABSOLUTE = 4e-6, 1e-9
NUDGES = 2


@dataclass
class Compared:
    """The result of a row.

    Attributes:
        status: ``equal``, ``different``, ``refused`` or ``broken``.
        reason: in words.
        worst: the largest error over its bound.
        blind: share of gradients whose bound is wider than a thousandth of them.
    """

    row: Row
    status: str
    reason: str = ""
    worst: float = 0.0
    blind: float = 0.0
    where: str = ""
    errors: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status:9} {self.worst:6.2f} {self.blind:.0%} {self.row}  {self.where} {self.reason}"


@lru_cache(maxsize=4)
def _reference(row: Row) -> tuple[Reference, list[Example]]:
    reference = Reference(row)
    return reference, examples_of(bare(row), row)


def compare(pool: RankPool, row: Row, mutant: Mutant | None = None, timeout_s: float = 120) -> Compared:
    """Train the row on its ranks, and in one process."""
    reference, examples = _reference(row)
    steps = list(row.cells(kinds_of(examples)))
    samples = [example.sample for example in examples]
    try:
        found = pool.run(train, row, samples, steps, mutant, timeout_s=timeout_s, world=row.parsed.num_ranks)
    except RankError as error:
        return Compared(row, "broken", str(error))
    if refused := [text for text in found if isinstance(text, str)]:
        is_agreed = len(refused) == len(found)
        return Compared(row, "refused" if is_agreed else "broken", refused[0])
    drawn = [samples_in(examples, cells) for cells in steps]
    expected = reference.train(drawn)
    nudged = [reference.train(drawn, nudge) for nudge in range(NUDGES)]
    return judged(row, found, expected, nudged)


def judged(row: Row, found: Sequence[Outcome], expected: Outcome, nudged: Sequence[Outcome]) -> Compared:
    errors: dict[str, float] = {}
    blind = []
    for what in ("losses", "norms"):
        for step in range(STEPS):
            wanted = getattr(expected, what)[step]
            noise = max(abs(getattr(other, what)[step] - wanted) for other in nudged)
            bound = max(FACTOR * noise, RELATIVE * abs(wanted), 1e-7)
            errors[f"{what} {step}"] = max(abs(getattr(one, what)[step] - wanted) for one in found) / bound
    for what in ("gradients", "moved"):
        tensors: Mapping[str, Tensor] = getattr(expected, what)
        held: dict[str, list[Tensor]] = {}
        for one in found:
            for name, tensor in getattr(one, what).items():
                held.setdefault(name, []).append(tensor)
        if what == "gradients":
            expected_names = {name for name in tensors}
            for name in sorted(expected_names ^ held.keys()):
                side = tensors.get(name, held.get(name, [None])[0])
                errors[
                    f"{'no gradient' if name in tensors else 'a gradient'} of {name} ({float(side.abs().max()):.1e})"
                ] = float("inf")
        for name in tensors.keys() & held.keys():
            wanted = tensors[name]
            noise = max(float((getattr(other, what).get(name, wanted) - wanted).abs().max()) for other in nudged)
            size = float(wanted.abs().max())
            floor = ABSOLUTE if what == "gradients" else 4e-7
            bound = max(FACTOR * noise, RELATIVE * size, floor)
            if what == "gradients":
                blind.append(bound > 1e-3 * size)
            errors[f"{what} {name}"] = max(float((tensor - wanted).abs().max()) for tensor in held[name]) / bound
            if not all(torch.equal(tensor, held[name][0]) for tensor in held[name]):
                errors[f"copies of {what} {name}"] = float("inf") if what == "moved" else errors[f"{what} {name}"]
    where = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    worst = errors[where]
    wrong = {name: error for name, error in errors.items() if not error <= 1}
    reason = f"{len(wrong)} wrong: " + ", ".join(list(wrong)[:6]) if wrong else ""
    return Compared(
        row, "different" if wrong else "equal", reason, worst, sum(blind) / max(1, len(blind)), where, errors
    )
