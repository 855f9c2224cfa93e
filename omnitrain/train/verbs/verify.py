"""``verify`` a recipe's model on given samples, or (``omnitrain verify``) on the recipe's data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from omnitrain.data.loading.loader import StepLoader, build_dataloader
from omnitrain.data.packing.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.environment import available_memory
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.arguments import Factory, require_ranks
from omnitrain.parallel.verify.tiny_model import fits
from omnitrain.parallel.verify.verify import VerifyReport
from omnitrain.parallel.verify.verify import verify as verify_model
from omnitrain.recipe import Recipe
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
from omnitrain.recipe.plan_groups import Precision
from omnitrain.train.build_from_recipe import build_from_recipe, use_own_functions
from omnitrain.train.metrics.display import quiet_libraries

_OWN_PLAN = "plan"
_OWN_DTYPES = {  # word -> the dtypes of the recipe's own plan
    _OWN_PLAN: None,
    f"{_OWN_PLAN}.bf16": Precision(compute="bfloat16"),
    f"{_OWN_PLAN}.bf16_param": Precision(param="bfloat16"),
}
_USUAL = ("dp2", "dp4", "hsdp2x2")


def verify(
    model_factory: Factory | Recipe,
    samples: Sequence[Any],
    layouts: Sequence[str | Layout | ParallelPlan],
    *,
    nproc: int = 4,
    tolerance: float = 1e-5,
    timeout_s: float = 600.0,
    pool: RankPool | None = None,
    memory: float | None = None,
) -> VerifyReport:
    """Train one global batch under each layout and compare with one process.

    If the model is too large for this machine, its layers, experts and vocabulary are reduced; hidden widths stay.
    :attr:`VerifyReport.size` gives the size that was used.

    Args:
        model_factory: a picklable function, a function defined in a notebook, or ``"module:function"``, that returns a
            HF model or an :class:`OmniModel`. It is called several times, each time with torch's seed 0, and must make
            the same model. A model on the meta device gets random weights. Or a recipe, whose model is used.
        samples: the global batch: :class:`Sample`, or HF-style arguments of one sample with ``labels``.
        layouts: layouts such as ``dp4``, ``hsdp2x2``, ``dp2.accum2.recompute``, or parallel plans. A plan uses as many
            ranks as the product of its foundation's degrees, or all ranks if they are unset. Dtypes that a plan leaves
            unset are fp32. A layout in bf16 (``dp4.bf16``, ``dp4.bf16_param``, or a plan with ``precision``) is
            compared with one process in the same dtypes, and only by its first step.
        nproc: maximum number of ranks at a time.
        tolerance: allowed relative error in fp32. If rounding is larger (measured on the reference with another order
            of samples), 20 times the rounding is allowed. A gradient that is zero up to rounding has no relative error:
            it may be at most 20 times as large as in one process. In bf16, an error is allowed up to what rounding
            explains (:class:`omnitrain.ops.rounding.Rounding`).
        timeout_s: time limit of one layout in seconds.
        pool: ranks to run on; None: start new ones.
        memory: bytes that may be used; None: all available.

    Raises:
        UserError: there are no samples or layouts, there is nothing to predict, a factory or layout does not exist, an
            argument has the wrong type, the factory cannot be pickled or makes a different model each time, the model
            is too large even when reduced, or parts of a recipe do not fit together.
    """
    if isinstance(model_factory, Recipe):
        require_ranks(nproc)
        model_factory = _factory(model_factory, model_of(model_factory, "meta"), nproc, memory)
    return verify_model(
        model_factory, samples, layouts, nproc=nproc, tolerance=tolerance, timeout_s=timeout_s, pool=pool, memory=memory
    )


def verify_recipe(
    recipe: Recipe,
    layouts: Sequence[str] = (),
    *,
    nproc: int = 4,
    num_samples: int = 12,
    pool: RankPool | None = None,
    memory: float | None = None,
) -> VerifyReport:
    """Train one global batch of the recipe's first samples under each layout and compare with one process.

    Among ``layouts`` (see :func:`verify`, also for the other arguments), ``plan`` is the recipe's plan, in fp32 and
    without compilation, because both change rounding; ``plan.bf16`` and ``plan.bf16_param`` are the same in bf16. If
    none are given: ``plan`` if the recipe has one, ``dp2``, ``dp4`` and ``hsdp2x2``, of which the last three may be
    refused, but not all layouts. Raises UserError: parts of the recipe do not fit together, a layout is unknown, or no
    sample can be used.
    """
    quiet_libraries()
    recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"auto": False})})
    optional = () if layouts else _USUAL
    if not layouts:
        layouts = _USUAL if recipe.parallel == ParallelPlan() else [_OWN_PLAN, *_USUAL]
    parsed = [_parsed(recipe, layout) for layout in layouts]  # first, so that errors in them come before the work
    shapes, processor = build_from_recipe(recipe, "meta")
    loader = build_dataloader(recipe.data, processor, seed=recipe.train.seed, media_names=shapes.media_names)
    samples = first_usable(loader, num_samples)
    memory = available_memory() if memory is None else memory
    factory = _factory(recipe, shapes, nproc, memory)
    report = verify_model(factory, samples, parsed, nproc=nproc, pool=pool, memory=memory)
    rows = zip(report.rows, layouts, strict=True)
    return replace(report, rows=tuple(replace(row, is_optional=layout in optional) for row, layout in rows))


def _parsed(recipe: Recipe, layout: str) -> Layout | ParallelPlan:
    if layout in _OWN_DTYPES:
        return _own_plan(recipe, _OWN_DTYPES[layout])
    try:
        return parse_layout(layout)
    except UserError as error:
        raise UserError(f"{error}\n  or `{_OWN_PLAN}`, which is the recipe's own `parallel`") from None


def _own_plan(recipe: Recipe, precision: Precision | None) -> ParallelPlan:
    """Return the recipe's plan in these dtypes and not compiled, which would change rounding. None: fp32."""

    def exact(plan: ComponentPlan) -> ComponentPlan:
        return plan.model_copy(update={"precision": Precision(), "compile": None})

    plan = recipe.parallel
    components = {name: exact(component_plan) for name, component_plan in plan.components.items()}
    default = exact(plan.default).model_copy(update={"precision": precision or Precision()})
    return plan.model_copy(update={"default": default, "components": components})


def model_of(recipe: Recipe, device: str) -> OmniModel:
    """Build the model of a recipe, with the losses that it names; the same on every rank. On ``meta``, no weights."""
    quiet_libraries()
    model = build_from_recipe(recipe, device)[0]
    use_own_functions(model, recipe.train)
    return model


def _factory(recipe: Recipe, shapes: OmniModel, nproc: int, memory: float | None) -> Factory:
    """Return a function that makes the recipe's model, on ``meta`` if it is too large for ``nproc`` ranks."""
    return partial(model_of, recipe, "cpu" if fits(shapes, nproc, memory) else "meta")


def first_usable(loader: StepLoader, number: int) -> list[Sample]:
    """Return the first samples of a run; UserError: none of ``10 * number`` rows can be used."""
    drawn = (loader.rows[draw] for draw in islice(loader.order.draws(0), 10 * number))
    samples = list(islice((sample for sample in drawn if isinstance(sample, Sample)), number))
    if not samples:
        raise UserError(f"none of the first {10 * number} rows can be used")
    return samples
