"""Compare a row on its ranks with plain transformers, under a bound from rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

import torch
from torch import Tensor

from omnitrain.ops.rounding import DRAWS, Rounding, Step
from omnitrain.parallel.spawn.pool import RankError, RankPool
from tests.parallel.random_layouts.models import Example, bare, examples_of, kinds_of, samples_in
from tests.parallel.random_layouts.on_ranks import Mutant, train
from tests.parallel.random_layouts.reference import Outcome, Reference
from tests.parallel.random_layouts.rows import STEPS, Row

NUDGES = 2
FACTOR = 8.0
"""In fp32 a tensor may differ by so many times what it changes by if each weight moves to a neighbouring number; the
largest of 700 rows is 3."""
RELATIVE, ABSOLUTE, ULPS = 4e-6, 1e-9, 4e-7
"""What is allowed in any case: of a tensor's largest value; of a gradient that is zero in exact arithmetic, as that of
a key bias is; of a movement, which the precision of the weight rounds."""


@dataclass
class Compared:
    """The result of a row.

    Attributes:
        status: ``equal``, ``different``, ``refused`` in words by all ranks, or ``broken``.
        errors: what was compared -> its error over what rounding explains; infinite where one side has nothing.
        blind: share of the gradients of which an error of a thousandth would not be seen.
        reason: why it was refused, or broke.
    """

    row: Row
    status: str
    errors: dict[str, float] = field(default_factory=dict)
    blind: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        wrong = sorted(self.errors, key=lambda name: -self.errors[name])[:3]
        shown = ", ".join(f"{name} {self.errors[name]:.2f}" for name in wrong)
        return f"{self.status:9} blind {self.blind:.0%} '{self.row}' {shown} {self.reason}"


@lru_cache(maxsize=2)
def _prepared(row: Row) -> tuple[Reference, list[Example]]:
    return Reference(row), examples_of(bare(row), row)


def compare(pool: RankPool, row: Row, mutant: Mutant | None = None, timeout_s: float = 120) -> Compared:
    """Train the row on its ranks, and in one process."""
    reference, examples = _prepared(row)
    steps = list(row.cells(kinds_of(examples)))
    samples = [example.sample for example in examples]
    try:
        found = pool.run(train, row, samples, steps, mutant, timeout_s=timeout_s, world=row.parsed.num_ranks)
    except RankError as error:
        return Compared(row, "broken", reason=str(error))
    if refused := [text for text in found if isinstance(text, str)]:
        return Compared(row, "refused" if len(refused) == len(found) else "broken", reason=refused[0])
    drawn = [samples_in(examples, cells) for cells in steps]
    expected = reference.train(drawn)
    is_low = row.precision != "fp32"
    draws = [reference.train(drawn, draw) for draw in range(DRAWS if is_low else NUDGES)]
    exact = cache(lambda: Reference(row._replace(precision="fp32")).train(drawn))
    errors = _low_errors(found, expected, draws, exact) if is_low else _errors(found, expected, draws)
    if row.optimizer == "int8":
        precise = Reference(row._replace(optimizer="adamw")).train(drawn)
        errors |= _errors_of_8_bits(found, expected, precise, errors)
    errors |= _apart(found, expected)
    is_equal = all(error <= 1 for error in errors.values())
    return Compared(row, "equal" if is_equal else "different", errors, _blind(expected, draws))


def _apart(found: Sequence[Outcome], expected: Outcome) -> dict[str, float]:
    """Gradients that only one side has, and parameters whose copies on several ranks differ."""
    errors = {}
    names = {name for one in found for name in one.gradients}
    for name in expected.gradients.keys() - names:
        errors[f"no gradient of {name}"] = math.inf
    for name in names - expected.gradients.keys():
        errors[f"a gradient of {name}"] = math.inf
    for name in expected.moved:
        copies = [one.moved[name] for one in found if name in one.moved]
        if not copies or any(not torch.equal(copy, copies[0]) for copy in copies):
            errors[f"copies of {name}"] = math.inf
    return errors


def _errors(found: Sequence[Outcome], expected: Outcome, draws: Sequence[Outcome]) -> dict[str, float]:
    errors = {}
    for what in ("losses", "norms"):
        for step in range(STEPS):
            wanted, *noisy = (torch.tensor(getattr(one, what)[step], dtype=torch.float64) for one in (expected, *draws))
            got = [torch.tensor(getattr(one, what)[step], dtype=torch.float64) for one in found]
            errors[f"{what} {step}"] = _distance(got, wanted) / _bound(wanted, noisy, 1e-7)
    for what, floor in (("gradients", ABSOLUTE), ("moved", ULPS)):
        for name, wanted in getattr(expected, what).items():
            got = [getattr(one, what)[name] for one in found if name in getattr(one, what)]
            noisy = [getattr(one, what).get(name, wanted) for one in draws]
            errors[f"{what} {name}"] = _distance(got, wanted) / _bound(wanted, noisy, floor)
    return errors


def _errors_of_8_bits(
    found: Sequence[Outcome], expected: Outcome, precise: Outcome, errors: Mapping[str, float]
) -> dict[str, float]:
    """Movements, of which 8 bits may change twice as much as in one process: shards have blocks of their own, or fp32.

    Args:
        found: of the ranks.
        expected: in one process, with blocks of whole tensors.
        precise: the same with moments in fp32.
        errors: without the blocks of shards.
    """
    bounds = {name: 2 * _distance([moved], precise.moved[name]) for name, moved in expected.moved.items()}
    return {
        f"moved {name}": min(
            errors[f"moved {name}"],
            _distance([one.moved[name] for one in found if name in one.moved], precise.moved[name]) / bound,
        )
        for name, bound in bounds.items()
        if bound
    }


def _low_errors(
    found: Sequence[Outcome], expected: Outcome, draws: Sequence[Outcome], exact: Callable[[], Outcome]
) -> dict[str, float]:
    """The same in low precision, where a tensor may also be at most twice as far from ``exact`` as ``expected`` is.

    transformers rounds logits, which moved weights show too little of where they are large; omnitrain does not.
    """
    errors = {}
    for step, what in ((0, "gradients"), (STEPS - 1, "moved")):
        wanted, *noisy = (_step(one, step, what) for one in (expected, *draws))
        together = {name: tensor for one in found for name, tensor in getattr(one, what).items()}
        got = found[0].losses[step], together
        for name, deviation in Rounding(wanted, noisy).deviations(got).items():
            error = deviation.excess
            if error > 1 and name in together and name in wanted[1]:
                true = getattr(exact(), what)[name]
                error = min(error, float((together[name] - true).norm() / (2 * (wanted[1][name] - true).norm())))
            errors[f"{what} {name}"] = error
    return errors


def _step(outcome: Outcome, step: int, what: str) -> Step:
    return outcome.losses[step], getattr(outcome, what)


def _distance(got: Sequence[Tensor], wanted: Tensor) -> float:
    found = [float((tensor - wanted).abs().max()) for tensor in got]
    return max((math.inf if math.isnan(distance) else distance for distance in found), default=0.0)


def _bound(wanted: Tensor, noisy: Sequence[Tensor], floor: float) -> float:
    return max(FACTOR * _distance(noisy, wanted), RELATIVE * float(wanted.abs().max()), floor)


def _blind(expected: Outcome, draws: Sequence[Outcome]) -> float:
    """The share of gradients whose bound is above a thousandth of their largest value."""
    blind = [
        _bound(gradient, [one.gradients.get(name, gradient) for one in draws], ABSOLUTE) > 1e-3 * gradient.abs().max()
        for name, gradient in expected.gradients.items()
        if gradient.any()
    ]
    return sum(map(bool, blind)) / max(len(blind), 1)
