"""``verify``: compare loss, gradients and weights of every layout with one process, on the user's model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor

from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.contract.trial import errors_of, largest
from omnitrain.models.hf.samples import to_samples
from omnitrain.ops.experts.routing_replay import Recording
from omnitrain.ops.rounding import LOSS, Rounding
from omnitrain.parallel.adapter_plan import adapters_for
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.resolve.sections import divide_encoders
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.verify.arguments import Factory, build_with, require_arguments, require_losses
from omnitrain.parallel.verify.reference import (
    Alone,
    Noise,
    dtypes_of,
    low_precision_reference,
    omni,
    reference,
    step_of,
)
from omnitrain.parallel.verify.run import STEPS, Outcome, micro_batches, train
from omnitrain.parallel.verify.tiny_model import described, num_parameters, tiny_model_of
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.parallel import FOUNDATION, MAIN, ParallelPlan
from omnitrain.terminal import as_text

_NOISE_FACTOR = 20.0
_MOST_ROUNDING = 1e-4  # a larger error is a difference, however much the gradient changes


@dataclass(frozen=True)
class VerifyRow:
    """The comparison of one layout with one process.

    Attributes:
        layout: the layout as given.
        status: ``equal``, ``different``, or ``refused``.
        reason: why it is different or refused; empty if it is equal.
        is_optional: whether nobody named the layout, so that it may be refused.
        loss_error: relative error of the loss.
        grad_error: error of the worst gradient, relative to the largest element of that gradient.
        worst_parameter: name of the parameter with the worst gradient.
        weight_error: error of the worst weight after three steps of SGD with momentum, relative to the largest element
            of that weight.
        peak_memory_mb: peak memory of rank 0's process, MiB.
        collectives: number of collectives that rank 0 issued in the first step.
        rounding: how much that gradient changes in one process if every weight moves to a neighbouring number; NaN if
            no gradient has an error for which this was measured. In bf16, the error that rounding explains.
        visible: in bf16, the smallest visible error of all gradients: 0.02 if they are multiplied by 1.02. NaN in fp32.
        near_ties: number of (token, layer) pairs in three steps that would have gone to other experts than in one
            process, with nearly the same score. They were sent to the same experts, to make gradients comparable.
    """

    layout: str
    status: str
    reason: str = ""
    loss_error: float = float("nan")
    grad_error: float = float("nan")
    worst_parameter: str = ""
    rounding: float = float("nan")
    weight_error: float = float("nan")
    peak_memory_mb: float = float("nan")
    collectives: int = 0
    near_ties: int = 0
    visible: float = float("nan")
    is_optional: bool = False


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """The result of :func:`verify`, one row per layout; prints as a table."""

    rows: tuple[VerifyRow, ...]
    parameters: int  # of the verified model
    size: str = ""  # of that model in words, with the reductions if the full model is too large for this machine

    @property
    def ok(self) -> bool:
        """Whether at least one layout is equal, and each other one, too; one that nobody named may be refused."""
        statuses = {row.status for row in self.rows}
        return "equal" in statuses and "different" not in statuses and not self.refused

    @property
    def refused(self) -> list[VerifyRow]:
        """The rows that were refused although their layout was named, or although nothing else was compared."""
        refused = [row for row in self.rows if row.status == "refused"]
        return refused if len(refused) == len(self.rows) else [row for row in refused if not row.is_optional]

    def __repr__(self) -> str:
        table = Table("layout", "status", "loss", "gradients", "worst", "weights", "collectives", "reason")
        for row in self.rows:
            figures = (row.loss_error, row.grad_error, row.weight_error)
            loss, gradient, weight = ("-" if math.isnan(error) else f"{error:.1e}" for error in figures)
            count = "-" if row.status == "refused" else str(row.collectives)
            worst = row.worst_parameter or "-"
            table.add_row(row.layout, row.status, loss, gradient, worst, weight, count, escape(row.reason))
        lines = [f"model: {self.size}"]
        for row in self.rows:
            if not math.isnan(row.visible):
                lines.append(
                    f"{row.layout}: rounding explains {row.rounding:.1e} of the gradient of {row.worst_parameter}; if "
                    f"all gradients were off by a factor of {1 + row.visible:.3f}, it would show"
                )
            elif not math.isnan(row.rounding):
                lines.append(
                    f"{row.layout}: the gradient of {row.worst_parameter} is off by {row.grad_error:.1e}; in one "
                    f"process it changes by {row.rounding:.1e} if every weight moves to a neighbouring number"
                )
            if row.near_ties:
                lines.append(
                    f"{row.layout}: {row.near_ties} times, a token's experts had nearly equal scores; the experts "
                    "of the single-process run were used"
                )
        return as_text(table, *map(Text, lines), columns=160)


@dataclass(frozen=True)
class _Case:
    """A layout to verify."""

    name: str  # its name in reports
    plan: ParallelPlan  # its parallel plan
    accumulation: int  # micro-batches per step
    ranks: int  # number of ranks


def verify(
    model_factory: Factory,
    samples: Sequence[Any],
    layouts: Sequence[str | Layout | ParallelPlan],
    *,
    nproc: int = 4,
    tolerance: float = 1e-5,
    timeout_s: float = 600.0,
    pool: RankPool | None = None,
    memory: float | None = None,
) -> VerifyReport:
    """Verify a model factory; :func:`omnitrain.verify` also takes recipes, and documents the arguments and errors."""
    require_arguments(model_factory, samples, layouts, nproc, tolerance)
    cases = [_case(layout, nproc) for layout in layouts]
    ranks = pool or RankPool(nproc, preload=("omnitrain.parallel.verify.verify",))
    try:
        full = build_with(model_factory)
        if not samples:
            raise UserError("no samples to verify with; give at least one")
        if tiny := tiny_model_of(full, nproc, memory):
            model_factory, samples = tiny, [tiny.sample(sample) for sample in samples]
        model = omni(tiny() if tiny else full)
        size = described(model, full)
        del full
        batch = to_samples(model.runner.native, samples)
        require_losses(batch)

        @cache
        def expected(alone: Alone) -> tuple[Outcome, Noise | Rounding] | str:
            if not alone.dtypes:
                return reference(alone, batch)
            return ranks.run(low_precision_reference, alone, batch, timeout_s=timeout_s, world=1)[0]  # FSDP casts

        rows = []
        for case in cases:
            model.divide(())
            with suppress(UserError):  # the ranks refuse it, too
                divide_encoders(model, case.plan)
            adapters = adapters_for(model, case.plan)[0]
            frozen = frozenset(n for n in model.components if case.plan.of(n).freeze and n not in adapters)
            verify_case = partial(_row, ranks, model_factory, batch, case, nproc=nproc, tolerance=tolerance)
            alone = Alone(model_factory, frozen, tuple(adapters.items()), model.divided, dtypes_of(case.plan))
            rows.append(verify_case(partial(expected, alone), timeout_s=timeout_s))
        return VerifyReport(tuple(rows), num_parameters(model), size)
    finally:
        if pool is None:
            ranks.close()


def _case(layout: str | Layout | ParallelPlan, nproc: int) -> _Case:
    if isinstance(layout, str):
        layout = parse_layout(layout)
    if isinstance(layout, Layout):
        return _Case(str(layout), layout.plan(), layout.accumulation, layout.num_ranks)
    of_main, of_sections = layout.of(FOUNDATION).num_ranks, sum(section.ranks for section in layout.sections.values())
    return _Case(_shown(layout), layout, 1, nproc if of_main is None else of_main + of_sections)


def _shown(plan: ParallelPlan) -> str:
    """The fields that a plan sets, in one line."""
    fields = plan.model_dump(exclude_none=True, exclude_defaults=True)
    groups = {"default": fields.pop("default", {}), **fields.pop("components", {}), **fields}
    groups |= {name: {"globs": len(groups[name])} for name in ("tp_plan", "ep_plan") if name in groups}
    shown = {
        name: ", ".join(f"{key}={value}" for key, value in group.items()) for name, group in groups.items() if group
    }
    return " ".join(f"{name}({fields})" for name, fields in shown.items()) or "plan()"


def _row(
    pool: RankPool,
    factory: Factory,
    batch: list[Sample],
    case: _Case,
    reference: Callable[[], tuple[Outcome, Noise | Rounding] | str],
    *,
    nproc: int,
    tolerance: float,
    timeout_s: float,
) -> VerifyRow:
    if case.ranks > nproc:
        reason = f"needs {case.ranks} ranks, but nproc is {nproc}; use --nproc {case.ranks}"
        return VerifyRow(case.name, "refused", reason)
    try:
        found = reference()  # first, because it detects a factory that builds a different model each time
        if isinstance(found, str):
            return VerifyRow(case.name, "refused", found)
        expected, rounding = found
        if not expected.gradients:
            reason = "nothing can be compared: no trained parameter of this layout gets a gradient from these samples"
            return VerifyRow(case.name, "refused", reason)
        call = (_train_on_rank, factory, batch, case, expected.routing)
        (outcome, *_) = pool.run(*call, timeout_s=timeout_s, world=case.ranks)
    except RankError as error:
        return VerifyRow(case.name, "different", str(error))
    if isinstance(outcome, str):
        return VerifyRow(case.name, "refused", outcome)
    return _compared(case.name, outcome, expected, rounding, tolerance)


def _compared(
    layout: str, outcome: Outcome, expected: Outcome, rounding: Noise | Rounding, tolerance: float
) -> VerifyRow:
    loss_error = abs(outcome.loss - expected.loss) / max(abs(expected.loss), 1e-30)
    if missing := outcome.gradients.keys() ^ expected.gradients.keys():
        reason = f"{len(missing)} parameters have a gradient on one side only, such as {min(missing)}"
        return VerifyRow(layout, "different", reason, loss_error)
    if isinstance(rounding, Rounding):
        reasons, figures = _in_low_precision(outcome, rounding)
    else:
        reasons, figures = _in_fp32(outcome, expected, rounding, loss_error, tolerance)
    figures |= {"peak_memory_mb": outcome.peak_memory_mb, "collectives": outcome.collectives}
    return VerifyRow(layout, "different" if reasons else "equal", "; ".join(reasons), loss_error, **figures)


def _in_low_precision(outcome: Outcome, rounding: Rounding) -> tuple[list[str], dict[str, Any]]:
    """Compare the loss and the gradients of the first step; rounding moves later ones further apart."""
    deviations = rounding.deviations(step_of(outcome))
    loss = deviations.pop(LOSS)
    worst = max(deviations, key=lambda name: deviations[name].excess)
    gradient = deviations[worst]
    what = {"the loss": loss, f"the gradient of {worst}": gradient}
    return [f"{name} is {each}" for name, each in what.items() if each.excess > 1], {
        "grad_error": gradient.distance,
        "worst_parameter": worst,
        "rounding": gradient.most_distance,
        "visible": rounding.visible,
        "near_ties": int(outcome.replayed.near_ties) + int(outcome.replayed.others),
    }


def _in_fp32(
    outcome: Outcome, reference: Outcome, rounding: Noise, loss_error: float, tolerance: float
) -> tuple[list[str], dict[str, Any]]:
    """Compare the loss, the gradients of the first step, and the weights after all steps."""
    errors = _errors(outcome.gradients, reference.gradients, rounding)
    noise = {name: _NOISE_FACTOR * orders for name, orders in rounding.gradients.items()}
    gradients = _worst(errors, noise, tolerance)
    neighbours: dict[str, float] = {}
    if not gradients[1] <= gradients[2]:
        neighbours = rounding.neighbours()
        noise = {name: max(orders, min(neighbours[name], _MOST_ROUNDING)) for name, orders in noise.items()}
        gradients = _worst(errors, noise, tolerance)
    noise = {name: _NOISE_FACTOR * orders for name, orders in rounding.weights.items()}
    weights = _worst(_errors(outcome.weights, reference.weights, rounding), noise, tolerance)
    reasons = [] if loss_error <= tolerance else [f"the loss is off by {loss_error:.1e}, {tolerance:.1e} allowed"]
    for kind, (name, error, allowed) in (("gradient", gradients), ("weight after three steps", weights)):
        if not error <= allowed:
            reasons.append(f"the {kind} of {name} is off by {error:.1e}, {allowed:.1e} allowed")
    # Each step rounds the movement to the weight's precision.
    precision = {name: STEPS * torch.finfo(w.dtype).eps * largest(w) for name, w in reference.weights.items()}
    for kind, got, expected, floor in (
        ("gradient", outcome.gradients, reference.gradients, {}),
        ("movement", outcome.moved, reference.moved, precision),
    ):
        reasons += [
            f"the {kind} of {name} is {largest(got[name]):.1e}, but zero up to rounding ({largest(expected[name]):.1e})"
            " in one process"
            for name in sorted(rounding.empty)
            if not largest(got[name]) <= max(_NOISE_FACTOR * largest(expected[name]), floor.get(name, 0.0))
        ]
    if outcome.replayed.others:
        reasons.append(f"{outcome.replayed.others} times, a token went to other experts, and not by a near tie")
    return reasons, {
        "grad_error": gradients[1],
        "worst_parameter": gradients[0],
        "rounding": neighbours.get(gradients[0], math.nan),
        "weight_error": weights[1],
        "near_ties": int(outcome.replayed.near_ties),
    }


def _errors(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], rounding: Noise) -> dict[str, float]:
    """Errors of tensors that are not zero up to rounding."""
    told = {name: tensor for name, tensor in expected.items() if tensor.numel() and name not in rounding.empty}
    return errors_of({name: got[name] for name in told}, told)


def _worst(errors: Mapping[str, float], noise: Mapping[str, float], tolerance: float) -> tuple[str, float, float]:
    """Name, error and allowed error of the tensor that is most above what is allowed, else has the largest error."""
    allowed = {name: max(tolerance, noise[name]) for name in errors}
    name = max(errors, key=lambda n: (math.isnan(errors[n]), max(errors[n] / allowed[n], 1.0), errors[n]))
    return name, errors[name], allowed[name]


def _train_on_rank(
    factory: Factory, batch: list[Sample], case: _Case, routing: tuple[Recording, ...] | None
) -> Outcome | str | None:
    """Train on this rank; rank 0 returns the outcome. A refused layout returns the reason."""
    model = omni(build_with(factory))
    try:
        state = init_state_of(case.plan)
        main = state.of_section(MAIN)
        table = micro_batches(model, batch, main.dp_size, case.accumulation)
        for pack in chain(*table) if main.size("sequence") > 1 else ():
            model.runner.in_forward.require_whole_sequence(pack)
        build_parallelize_model(model, parallel_plan=case.plan, enable_mixed_precision=None)
    except UserError as error:
        return str(error)
    outcome = train(model, table[state.dp_rank] if state.section == MAIN else [], routing)
    return outcome if state.rank == 0 else None
