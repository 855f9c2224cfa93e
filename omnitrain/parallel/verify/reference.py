"""Train in one process, and measure the effect of rounding: the reference of each layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from transformers import PreTrainedModel

from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.adapters.lora import Adapters, add_lora
from omnitrain.models.contract.trial import errors_of
from omnitrain.models.hf.compute_dtype import stays_fp32
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.models.omni.named_parameters import freeze
from omnitrain.ops.experts.routing_replay import Recording
from omnitrain.ops.rounding import Rounding, Step, nudge
from omnitrain.optim.adamw import local_shard
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.resolve import dtype_of
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.verify.arguments import Factory, build_with, require_same_weights
from omnitrain.parallel.verify.run import STEPS, Outcome, train
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
from omnitrain.recipe.plan_groups import Precision

# How much a gradient changes if every weight moves to a neighbouring number differs tenfold with the random directions.
_MOVES = 3
# If a gradient changes by this fraction when every weight moves to a neighbouring number, it is only rounding.
_NO_DIGITS = 0.1


@dataclass(frozen=True)
class Alone:
    """What one process trains."""

    factory: Factory  # builds the model
    frozen: frozenset[str] = frozenset()  # components that do not train
    adapters: tuple[tuple[str, Adapters], ...] = ()  # components with LoRA adapters
    divided: tuple[str, ...] = ()  # encoders whose tower and projector are components by themselves
    dtypes: str = ""  # the dtypes of the layout, as a plan in JSON; empty: fp32 everywhere

    def model(self) -> OmniModel:
        """Build it, in fp32 and not parallelized."""
        model = omni(build_with(self.factory))
        model.divide(self.divided)  # to name its parts
        freeze(model, sorted(self.frozen))
        add_lora(model, dict(self.adapters))
        model.divide(())
        return model


@dataclass(frozen=True)
class Noise:
    """The effect of rounding on one process that computes in fp32."""

    # parameter name -> error of its gradient between two orders of the samples, as in :func:`relative_errors`
    gradients: dict[str, float]
    weights: dict[str, float]  # parameter name -> the same for its weight
    empty: frozenset[str]  # names of parameters whose gradient is zero up to rounding
    # measures parameter name -> largest error of its gradient if every weight moves to a neighbouring number
    neighbours: Callable[[], dict[str, float]]


def reference(alone: Alone, batch: list[Sample]) -> tuple[Outcome, Noise]:
    """Train in one process with one sample per pack, and measure the effect of rounding.

    A second run reverses the order of the samples. A third moves every weight to a neighbouring number: a gradient
    that is zero up to rounding then changes completely, others as much as rounding changes them. Where that matters,
    further runs move them in other directions. Such a run takes one step, since only its gradients are compared. All
    replay the routing of the first run.
    """
    first: dict[str, bytes] = {}

    def trained(
        samples: list[Sample], routing: tuple[Recording, ...] | None = None, *, move: int | None = None
    ) -> Outcome:
        model = alone.model()
        require_same_weights(model, first)
        if move is not None:
            trains = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            nudge(trains, lambda name: trains[name].dtype, seed=move)
        return train(model, _alone_in_packs(samples), routing, STEPS if move is None else 1)

    expected = trained(batch)
    reversed_order = trained(batch[::-1], expected.routing)

    @cache
    def change(move: int) -> dict[str, float]:
        return errors_of(trained(batch, expected.routing, move=move).gradients, expected.gradients)

    return expected, Noise(
        errors_of(reversed_order.gradients, expected.gradients),
        errors_of(reversed_order.weights, expected.weights),
        frozenset(name for name, error in change(0).items() if error > _NO_DIGITS),
        lambda: {name: max(change(move)[name] for move in range(_MOVES)) for name in expected.gradients},
    )


def low_precision_reference(alone: Alone, batch: list[Sample]) -> tuple[Outcome, Rounding] | str:
    """The first step in the dtypes of a layout, on the only rank of a pool; or why the model is refused."""
    plan = ParallelPlan.model_validate_json(alone.dtypes)
    model = alone.model()
    try:
        init_state_of(plan)
        build_parallelize_model(model, parallel_plan=plan, enable_mixed_precision=None)
    except UserError as error:
        return str(error)
    expected: list[Outcome] = []

    def step() -> Step:
        outcome = train(model, _alone_in_packs(batch), expected[0].routing if expected else None, steps=1)
        expected[:] = expected or [outcome]
        return step_of(outcome)

    weights = {name: local_shard(parameter) for name, parameter in model.named_parameters()}
    rounding = Rounding.measure(step, weights, _compute_dtypes(model, plan))
    return expected[0], rounding


def step_of(outcome: Outcome) -> Step:
    """The loss and the gradients of the first step."""
    return outcome.loss, outcome.gradients


def dtypes_of(plan: ParallelPlan) -> str:
    """The dtypes that a plan sets, as a plan in JSON; empty: it sets none but fp32."""
    plans = {"default": plan.default, **plan.components}
    set_by = {name: plan.precision for name, plan in plans.items() if plan.precision != Precision()}
    if not any("bfloat16" in (dtypes.param, dtypes.compute) for dtypes in set_by.values()):
        return ""
    dtypes = {name: ComponentPlan(precision=precision) for name, precision in set_by.items()}
    return ParallelPlan(default=dtypes.pop("default", ComponentPlan()), components=dtypes).model_dump_json()


def _compute_dtypes(model: OmniModel, plan: ParallelPlan) -> Callable[[str], torch.dtype]:
    """Parameter name -> the dtype in which the model computes with it."""
    component = {path: name for name, parameters in model.components.items() for path in parameters}
    must_stay_fp32 = stays_fp32(model)

    def dtype_at(path: str) -> torch.dtype:
        precision = plan.of(component[path]).precision
        dtype = dtype_of(precision.compute or precision.param)
        return torch.float32 if must_stay_fp32(path) or dtype is None else dtype

    return dtype_at


def omni(model: PreTrainedModel) -> OmniModel:
    """The omni model that trains, of a model that a factory built."""
    return (model if isinstance(model, OmniModel) else build_omni_model(foundation=model)).train()


def _alone_in_packs(samples: list[Sample]) -> list[Pack]:
    return [Pack.from_samples([sample]) for sample in samples]
