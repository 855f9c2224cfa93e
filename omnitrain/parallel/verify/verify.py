"""``verify``: every layout gives the loss, the gradients and the weights of one process, on the user's own model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from omnitrain.data.pack import Pack
from omnitrain.data.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import Adapters, add_lora
from omnitrain.models.hf.samples import to_samples
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.freeze import freeze
from omnitrain.models.omni.model import OmniModel
from omnitrain.ops.experts import Recording
from omnitrain.parallel.adapter_plan import adapters_for
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.spawn.pool import RankError, RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.verify.arguments import (
    Factory,
    made_by,
    require_arguments,
    require_losses,
    require_same_weights,
)
from omnitrain.parallel.verify.run import STEPS, Outcome, micro_batches, train
from omnitrain.parallel.verify.tiny_model import described, num_parameters, twin_of
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.parallel import FOUNDATION, ParallelPlan

_NOISE_FACTOR = 20.0
_NO_DIGITS = 0.1  # of its size: a gradient that moves so much when weights move to their neighbours is rounding


@dataclass(frozen=True)
class VerifyRow:
    """One layout against one process.

    Attributes:
        layout: as given.
        status: ``equal``, ``different``, or ``refused``.
        reason: why it differs or is refused; empty where it is equal.
        loss_error: relative.
        grad_error: of the worst parameter, relative to its largest gradient.
        worst_parameter: its name.
        weight_error: of the worst parameter after three steps of SGD with momentum, relative to its largest weight.
        peak_memory_mb: of a rank's process, MiB.
        collectives: that a rank issued for one step.
        near_ties: tokens of a layer that would have gone to other experts than in one process, of nearly the same
            score, in three steps. They were sent to the same ones, so that gradients can be compared.
    """

    layout: str
    status: str
    reason: str = ""
    loss_error: float = float("nan")
    grad_error: float = float("nan")
    worst_parameter: str = ""
    weight_error: float = float("nan")
    peak_memory_mb: float = float("nan")
    collectives: int = 0
    near_ties: int = 0


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """What :func:`verify` found; shown as a table.

    Attributes:
        rows: one per layout.
        parameters: of the model that was verified.
        size: of that model, in words; where the user's is too large for this machine, what was cut.
    """

    rows: tuple[VerifyRow, ...]
    parameters: int
    size: str = ""

    @property
    def ok(self) -> bool:
        """Every layout is equal, or refused with a reason."""
        return all(row.status == "equal" or (row.status == "refused" and row.reason) for row in self.rows)

    def __repr__(self) -> str:
        table = Table("layout", "status", "loss", "gradients", "worst", "weights", "collectives", "reason")
        for row in self.rows:
            errors = [f"{value:.1e}" for value in (row.loss_error, row.grad_error, row.weight_error)]
            table.add_row(
                row.layout,
                row.status,
                *errors[:2],
                row.worst_parameter,
                errors[2],
                str(row.collectives),
                escape(row.reason),
            )
        console = Console(width=160)
        with console.capture() as capture:
            console.print(table)
            console.print(f"model: {escape(self.size)}", highlight=False)
            for row in self.rows:
                if row.near_ties:
                    console.print(
                        f"{row.layout}: {row.near_ties} times, a token's experts were nearly tied and taken from one "
                        "process",
                        highlight=False,
                    )
        return capture.get()


@dataclass(frozen=True)
class _Rounding:
    """What one process itself leaves undetermined.

    Attributes:
        gradients: error of each gradient between two orders of the samples, relative as in :func:`_errors`.
        weights: the same of the weights.
        empty: parameters whose gradient is zero up to rounding.
    """

    gradients: dict[str, float]
    weights: dict[str, float]
    empty: frozenset[str]


@dataclass(frozen=True)
class _Case:
    """A layout to try.

    Attributes:
        name: as reports show it.
        plan: of all components.
        accumulation: micro-batches per step.
        ranks: that it takes.
    """

    name: str
    plan: ParallelPlan
    accumulation: int
    ranks: int


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
    """What :func:`omnitrain.verify` is for a factory that is no recipe; it has the arguments.

    Raises:
        UserError: see there.
    """
    require_arguments(model_factory, samples, layouts, nproc, tolerance)
    cases = [_case(layout, nproc) for layout in layouts]
    own = pool or RankPool(nproc, preload=("omnitrain.parallel.verify.verify",))
    try:
        full = made_by(model_factory)
        if not samples:
            raise UserError("no samples to verify with; give at least one")
        if twin := twin_of(full, nproc, memory):
            model_factory, samples = twin, [twin.sample(sample) for sample in samples]
        model = _omni(twin() if twin else full)
        size = described(model, full)
        del full
        batch = to_samples(model.runner.native, samples)
        require_losses(batch)
        reference = cache(partial(_in_one_process, model_factory, batch))
        rows = []
        for case in cases:
            adapters = adapters_for(model, case.plan)[0]
            frozen = frozenset(n for n in model.components if case.plan.of(n).freeze and n not in adapters)
            run = partial(_row, own, model_factory, batch, case, nproc=nproc, tolerance=tolerance, timeout_s=timeout_s)
            rows.append(run(partial(reference, frozen, tuple(adapters.items()))))
        return VerifyReport(tuple(rows), num_parameters(model), size)
    finally:
        if pool is None:
            own.close()


def _case(layout: str | Layout | ParallelPlan, nproc: int) -> _Case:
    if isinstance(layout, str):
        layout = parse_layout(layout)
    if isinstance(layout, Layout):
        return _Case(str(layout), layout.plan(), layout.accumulation, layout.num_ranks)
    return _Case(_shown(layout), layout, 1, layout.of(FOUNDATION).num_ranks or nproc)


def _shown(plan: ParallelPlan) -> str:
    """A plan in a line: what it sets."""
    fields = plan.model_dump(exclude_none=True, exclude_defaults=True)
    parts = {"default": fields.pop("default", {}), **fields.pop("components", {}), **fields}
    parts |= {name: {"globs": len(parts[name])} for name in ("tp_plan", "ep_plan") if name in parts}
    shown = {name: ", ".join(f"{key}={value}" for key, value in own.items()) for name, own in parts.items() if own}
    return " ".join(f"{name}({fields})" for name, fields in shown.items()) or "plan()"


def _row(
    pool: RankPool,
    factory: Factory,
    batch: list[Sample],
    case: _Case,
    reference: Callable[[], tuple[Outcome, _Rounding]],
    *,
    nproc: int,
    tolerance: float,
    timeout_s: float,
) -> VerifyRow:
    if case.ranks > nproc:
        return VerifyRow(case.name, "refused", f"needs {case.ranks} ranks, {nproc} may run")
    expected, rounding = reference()  # first: it knows a factory that makes another model each time
    if not expected.gradients:
        reason = (
            "nothing can be compared: what trains under this layout, if anything, gets no gradient from these samples"
        )
        return VerifyRow(case.name, "refused", reason)
    call = (_train_on_rank, factory, batch, case, expected.routing)
    try:
        (outcome, *_) = pool.run(*call, timeout_s=timeout_s, world=case.ranks)
    except RankError as error:
        return VerifyRow(case.name, "different", str(error))
    if isinstance(outcome, str):
        return VerifyRow(case.name, "refused", outcome)
    return _compared(case.name, outcome, expected, rounding, tolerance)


def _compared(layout: str, outcome: Outcome, reference: Outcome, rounding: _Rounding, tolerance: float) -> VerifyRow:
    loss_error = abs(outcome.loss - reference.loss) / max(abs(reference.loss), 1e-30)
    if missing := outcome.gradients.keys() ^ reference.gradients.keys():
        reason = f"{len(missing)} parameters have a gradient on one side only, such as {min(missing)}"
        return VerifyRow(layout, "different", reason, loss_error)
    gradients = _worst(_errors(outcome.gradients, reference.gradients, rounding), rounding.gradients, tolerance)
    weights = _worst(_errors(outcome.weights, reference.weights, rounding), rounding.weights, tolerance)
    reasons = [] if loss_error <= tolerance else [f"the loss is off by {loss_error:.1e}, {tolerance:.1e} allowed"]
    for what, (name, error, allowed) in (("gradient", gradients), ("weight after three steps", weights)):
        if not error <= allowed:
            reasons.append(f"the {what} of {name} is off by {error:.1e}, {allowed:.1e} allowed")
    digits = {name: STEPS * torch.finfo(w.dtype).eps * _size(w) for name, w in reference.weights.items()}
    for what, got, expected, lost in (
        ("gradient", outcome.gradients, reference.gradients, {}),
        ("movement", outcome.moved, reference.moved, digits),  # of which a step loses what is below a weight's digits
    ):
        reasons += [
            f"the {what} of {name} is {_size(got[name]):.1e}, and zero up to rounding ({_size(expected[name]):.1e}) in "
            "one process"
            for name in sorted(rounding.empty)
            if not _size(got[name]) <= max(_NOISE_FACTOR * _size(expected[name]), lost.get(name, 0.0))
        ]
    if outcome.replayed.others:
        reasons.append(f"{outcome.replayed.others} times, a token's experts are others, and not by a near tie")
    return VerifyRow(
        layout=layout,
        status="different" if reasons else "equal",
        reason="; ".join(reasons),
        loss_error=loss_error,
        grad_error=gradients[1],
        worst_parameter=gradients[0],
        weight_error=weights[1],
        peak_memory_mb=outcome.peak_memory_mb,
        collectives=outcome.collectives,
        near_ties=int(outcome.replayed.near_ties),
    )


def _worst(errors: Mapping[str, float], noise: Mapping[str, float], tolerance: float) -> tuple[str, float, float]:
    """Name, error and allowed error of the tensor that uses up most of what it is allowed; NaN is worst."""
    allowed = {name: max(tolerance, _NOISE_FACTOR * noise[name]) for name in errors}
    name = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name] / allowed[name]))
    return name, errors[name], allowed[name]


def _errors(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], rounding: _Rounding | None = None
) -> dict[str, float]:
    """Largest difference per tensor, relative to the tensor's largest value; not of what is only rounding."""
    return {
        name: float((got[name] - tensor).abs().max() / tensor.abs().max().clamp(min=torch.finfo(tensor.dtype).tiny))
        for name, tensor in expected.items()
        if tensor.numel() and (rounding is None or name not in rounding.empty)
    }


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _in_one_process(
    factory: Factory, batch: list[Sample], frozen: frozenset[str], adapters: tuple[tuple[str, Adapters], ...] = ()
) -> tuple[Outcome, _Rounding]:
    """The reference, every sample in a pack of its own, and what rounding leaves open in it.

    For that it is run with its samples in another order, and with every weight moved to a neighbouring number. The
    second tells gradients that are zero but for rounding: nothing is left of their digits, while others move about as
    little as the weights. Experts are chosen once.
    """
    first: dict[str, bytes] = {}

    def trained(
        change: Callable[[OmniModel], OmniModel],
        samples: list[Sample],
        routing: tuple[Recording, ...] | None = None,
    ) -> Outcome:
        model = _built(factory)
        require_same_weights(model, first)
        freeze(model, sorted(frozen))
        add_lora(model, dict(adapters))
        return train(change(model), [[Pack.from_samples([sample]) for sample in samples]], rank=0, routing=routing)

    reference = trained(lambda model: model, batch)
    turned = trained(lambda model: model, batch[::-1], reference.routing)
    moved = trained(_moved, batch, reference.routing)
    change = _errors(moved.gradients, reference.gradients)
    return reference, _Rounding(
        _errors(turned.gradients, reference.gradients),
        _errors(turned.weights, reference.weights),
        frozenset(name for name, error in change.items() if error > _NO_DIGITS),
    )


@torch.no_grad()
def _moved(model: OmniModel) -> OmniModel:
    """Each trained weight becomes one of its two neighbours, by chance."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            towards = torch.where(up.to(parameter.device), torch.inf, -torch.inf).to(parameter.dtype)
            parameter.copy_(torch.nextafter(parameter, towards))
    return model


def _built(factory: Factory) -> OmniModel:
    return _omni(made_by(factory))


def _omni(model: PreTrainedModel) -> OmniModel:
    return (model if isinstance(model, OmniModel) else build_omni_model(foundation=model)).train()


def _train_on_rank(
    factory: Factory, batch: list[Sample], case: _Case, routing: tuple[Recording, ...] | None
) -> Outcome | str | None:
    """The part of one rank; the outcome, or why the layout is refused, comes back from rank 0."""
    model = _built(factory)
    try:
        state = init_state_of(case.plan)
        table = micro_batches(model, batch, state.dp_size, case.accumulation)
        for pack in chain(*table) if state.size("sequence") > 1 else ():
            model.runner.in_forward.require_whole_row(pack)
        build_parallelize_model(model, parallel_plan=case.plan, enable_mixed_precision=False)
    except UserError as error:
        return str(error)
    outcome = train(model, table, state.dp_rank, routing)
    return outcome if state.rank == 0 else None
