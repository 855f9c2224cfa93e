"""``verify``: every layout gives the loss, the gradients and the weights of one process, on the user's own model."""

from __future__ import annotations

import importlib
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from omnitrain.data.pack import Pack
from omnitrain.data.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.build import build_omni_model
from omnitrain.models.hf_samples import idle_sample, to_samples
from omnitrain.models.native import special_ids
from omnitrain.models.omni import OmniModel
from omnitrain.parallel.meeting import DataPeers, open_meeting
from omnitrain.parallel.planning import StepPlanner, topology_of
from omnitrain.parallel.ranks import RankError, RankPool
from omnitrain.parallel.recompute import recompute_blocks
from omnitrain.parallel.shard import Sharding, shard
from omnitrain.parallel.step import accumulate_gradients
from omnitrain.recipe.layout import Layout, parse_layout

Factory = Callable[[], PreTrainedModel] | str

_STEPS = 3
_LEARNING_RATE, _MOMENTUM = 0.01, 0.9
_NOISE_FACTOR = 20.0
_FLOOR = 1e-6  # of the largest gradient: below it a tensor's gradient is rounding


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


@dataclass(frozen=True)
class VerifyReport:
    """What :func:`verify` found.

    Attributes:
        rows: one per layout.
        parameters: of the model that was verified.
    """

    rows: tuple[VerifyRow, ...]
    parameters: int

    @property
    def ok(self) -> bool:
        """Every layout is equal, or refused with a reason."""
        return all(row.status == "equal" or (row.status == "refused" and row.reason) for row in self.rows)

    def __str__(self) -> str:
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
        return capture.get()


@dataclass(frozen=True)
class _Outcome:
    """What one layout gave, full tensors on the CPU."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    peak_memory_mb: float
    collectives: int


@dataclass(frozen=True)
class _Noise:
    """Rounding of the reference itself, per tensor, relative as in :func:`_errors`."""

    gradients: dict[str, float]
    weights: dict[str, float]


def verify(
    model_factory: Factory,
    samples: Sequence[Any],
    layouts: Sequence[str | Layout],
    *,
    nproc: int = 4,
    tolerance: float = 1e-5,
    timeout_s: float = 600.0,
    pool: RankPool | None = None,
) -> VerifyReport:
    """Train one global batch under each layout and compare with one process.

    Args:
        model_factory: makes the model, the same on every rank: a picklable function or ``"module:function"`` that
            returns a HF model or an :class:`OmniModel`.
        samples: the global batch: :class:`Sample`, or HF-style arguments of one sample with ``labels``.
        layouts: such as ``dp4``, ``hsdp2x2``, ``dp2.accum2.recompute``.
        nproc: ranks that may run at a time.
        tolerance: relative error that is allowed; where rounding is larger (the reference itself in another order of
            samples), 20 times that.
        timeout_s: of one layout, seconds.
        pool: ranks to run on; None: a pool of its own.

    Raises:
        UserError: no such factory or layout.
    """
    plans = [parse_layout(layout) if isinstance(layout, str) else layout for layout in layouts]
    own = pool or RankPool(nproc, preload=("omnitrain.parallel.verify",))
    try:
        model = _built(model_factory)
        batch = to_samples(model.runner.native, samples)
        reference = _trained(model, [[Pack.from_samples([sample]) for sample in batch]], rank=0)
        noise = _noise_of(model_factory, batch, reference)
        run = partial(_row, own, model_factory, batch, nproc=nproc, tolerance=tolerance, timeout_s=timeout_s)
        rows = [run(plan, reference, noise) for plan in plans]
        return VerifyReport(tuple(rows), sum(p.numel() for p in model.parameters()))
    finally:
        if pool is None:
            own.close()


def _row(
    pool: RankPool,
    factory: Factory,
    batch: list[Sample],
    layout: Layout,
    reference: _Outcome,
    noise: _Noise,
    *,
    nproc: int,
    tolerance: float,
    timeout_s: float,
) -> VerifyRow:
    if layout.num_ranks > nproc:
        return VerifyRow(str(layout), "refused", f"needs {layout.num_ranks} ranks, {nproc} may run")
    if unavailable := [axis for axis in ("tp", "ulysses", "cp", "ep", "pp") if getattr(layout, axis) > 1]:
        return VerifyRow(str(layout), "refused", f"{', '.join(unavailable)}: not available yet")
    try:
        (outcome, *_) = pool.run(_train_on_rank, factory, batch, layout, timeout_s=timeout_s, world=layout.num_ranks)
    except RankError as error:
        return VerifyRow(str(layout), "different", str(error))
    return _compared(str(layout), outcome, reference, noise, tolerance)


def _compared(layout: str, outcome: _Outcome, reference: _Outcome, noise: _Noise, tolerance: float) -> VerifyRow:
    loss_error = abs(outcome.loss - reference.loss) / max(abs(reference.loss), 1e-30)
    if missing := outcome.gradients.keys() ^ reference.gradients.keys():
        reason = f"{len(missing)} parameters have a gradient on one side only, such as {min(missing)}"
        return VerifyRow(layout, "different", reason, loss_error)
    gradients = _worst(_errors(outcome.gradients, reference.gradients), noise.gradients, tolerance)
    weights = _worst(_errors(outcome.weights, reference.weights), noise.weights, tolerance)
    reasons = [] if loss_error <= tolerance else [f"the loss is off by {loss_error:.1e}, {tolerance:.1e} allowed"]
    for what, (name, error, allowed) in (("gradient", gradients), ("weight after three steps", weights)):
        if not error <= allowed:
            reasons.append(f"the {what} of {name} is off by {error:.1e}, {allowed:.1e} allowed")
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
    )


def _worst(errors: Mapping[str, float], noise: Mapping[str, float], tolerance: float) -> tuple[str, float, float]:
    """Name, error and allowed error of the tensor that uses up most of what it is allowed."""
    allowed = {name: max(tolerance, _NOISE_FACTOR * noise[name]) for name in errors}
    name = max(errors, key=lambda name: errors[name] / allowed[name])
    return name, errors[name], allowed[name]


def _errors(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest difference per tensor, relative to the tensor's largest value."""
    floor = _FLOOR * max((float(tensor.abs().max()) for tensor in expected.values() if tensor.numel()), default=1.0)
    return {
        name: float((got[name] - tensor).abs().max() / tensor.abs().max().clamp(min=floor))
        for name, tensor in expected.items()
        if tensor.numel()
    }


def _noise_of(factory: Factory, batch: list[Sample], reference: _Outcome) -> _Noise:
    """How far the reference moves when the same samples are added up in another order and grouping."""
    model = _built(factory)
    samples = batch[::-1]
    groups = [samples] if model.runner.contract.packs else [[sample] for sample in samples]
    other = _trained(model, [[Pack.from_samples(group) for group in groups]], rank=0)
    return _Noise(_errors(other.gradients, reference.gradients), _errors(other.weights, reference.weights))


def _built(factory: Factory) -> OmniModel:
    if isinstance(factory, str):
        module, _, name = factory.partition(":")
        try:
            factory = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UserError(f"no model factory {factory!r}: {error}") from None
    model = factory()  # type: ignore[operator]
    return (model if isinstance(model, OmniModel) else build_omni_model(foundation=model)).train()


def _train_on_rank(factory: Factory, batch: list[Sample], layout: Layout) -> _Outcome | None:
    """The part of one rank; the outcome comes back from rank 0."""
    model = _built(factory)
    table = _micro_batches(model, batch, layout.num_ranks, layout.accumulation)
    if layout.recompute:
        recompute_blocks(model)
    shape = (layout.dp_shard,) if layout.dp_replicate == 1 else (layout.dp_replicate, layout.dp_shard)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    shard(model, mesh, Sharding(offload=layout.offload))
    rank = dist.get_rank()
    outcome = _trained(model, table, rank)
    return outcome if rank == 0 else None


def _micro_batches(model: OmniModel, batch: list[Sample], ranks: int, accumulation: int) -> list[list[Pack]]:
    """The packs of every rank, equally many; a rank that runs out of samples gets idle ones."""
    runner = model.runner
    words = set(range(model.foundation.get_input_embeddings().weight.size(0))) - special_ids(model.foundation.config)
    idle = [idle_sample(runner.native, min(words))]
    table = []
    for rank in range(ranks):
        parts = [batch[rank::ranks][part::accumulation] or idle for part in range(accumulation)]
        shared = parts if runner.contract.packs else [[sample] for part in parts for sample in part]
        table.append([Pack.from_samples(samples) for samples in shared])
    longest = max(map(len, table))
    return [packs + [Pack.from_samples(idle)] * (longest - len(packs)) for packs in table]


def _trained(model: OmniModel, table: list[list[Pack]], rank: int) -> _Outcome:
    """Three steps on the packs of ``rank``, knowing those of all others."""
    topology = topology_of(model, len(table))
    meeting, _store = open_meeting()
    step = StepPlanner(topology, DataPeers(meeting), model.runner.apart)(table[rank])
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=_LEARNING_RATE, momentum=_MOMENTUM)
    gradients: dict[str, Tensor] = {}
    first_loss, collectives = 0.0, 0
    for number in range(_STEPS):
        with _Collectives() as communication:
            loss = accumulate_gradients(model, step).item()
        if number == 0:
            first_loss, collectives = _summed(loss), communication.count
            gradients = {name: _full(p.grad) for name, p in trained.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    weights = {name: _full(parameter.detach()) for name, parameter in trained.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return _Outcome(first_loss, gradients, weights, peak, collectives)


class _Collectives(TorchDispatchMode):
    """Counts the collectives that this rank issues, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def _summed(value: float) -> float:
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def _full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()
