"""``verify`` of a recipe's model: on samples of the caller's, or (``omnitrain verify``) on the recipe's own data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

from omnitrain.data.loader import StepLoader, build_dataloader
from omnitrain.data.sample import Sample
from omnitrain.errors import UserError
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.memory.allocator import available_memory
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.arguments import Factory, require_ranks
from omnitrain.parallel.verify.tiny_model import fits
from omnitrain.parallel.verify.verify import VerifyReport
from omnitrain.parallel.verify.verify import verify as verify_model
from omnitrain.recipe import Recipe
from omnitrain.recipe.layout import Layout, parse_layout
from omnitrain.recipe.parallel import ComponentPlan, ParallelPlan
from omnitrain.train.build_from_recipe import build_from_recipe
from omnitrain.train.metrics.display import quiet_libraries

_OWN_PLAN = "plan"
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

    A model that is too large for this machine is cut in layers, experts and vocabulary rows; hidden widths stay.
    :attr:`VerifyReport.size` says what was used.

    Args:
        model_factory: makes the model: a picklable function, one that a notebook defines, or ``"module:function"``,
            that returns a HF model or an :class:`OmniModel`. It is called several times, each time with torch's seed
            0, and must make the same model. On the meta device it has no weights: they are drawn. Or a recipe, whose
            model is meant; its data and its plan are left out.
        samples: the global batch: :class:`Sample`, or HF-style arguments of one sample with ``labels``.
        layouts: such as ``dp4``, ``hsdp2x2``, ``dp2.accum2.recompute``; or parallel plans. A plan takes the ranks that
            its foundation's degrees multiply to, or all of them if they are unset. Number formats that a plan leaves
            unset are fp32.
        nproc: ranks that may run at a time.
        tolerance: relative error that is allowed; where rounding is larger (the reference itself in another order of
            samples), 20 times that. A gradient that is zero up to rounding has no relative error: it must be as small,
            within 20 times, as in one process.
        timeout_s: of one layout, seconds.
        pool: ranks to run on; None: a pool of its own.
        memory: bytes that it may take; None: what is available.

    Raises:
        UserError: no samples or layouts, nothing to predict, no such factory or layout, an argument of another type, a
            factory that cannot be sent to another process or makes another model each time, a model that is too large
            even when it is cut, or what does not fit together in a recipe.
    """
    if isinstance(model_factory, Recipe):
        require_ranks(nproc)
        model_factory = _factory(model_factory, model_of(model_factory, "meta"), nproc, memory)
    return verify_model(
        model_factory,
        samples,
        layouts,
        nproc=nproc,
        tolerance=tolerance,
        timeout_s=timeout_s,
        pool=pool,
        memory=memory,
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

    Args:
        recipe: model, data and seed.
        layouts: such as ``dp4``, see :func:`verify`; ``plan`` is the recipe's own, in fp32 and without compilation,
            which round in ways of their own. None given: that, if it has one, ``dp2``, ``dp4`` and ``hsdp2x2``.
        nproc: ranks on this machine.
        num_samples: of the global batch.
        pool: ranks to run on; None: a pool of its own.
        memory: bytes that it may take; None: what is available. A model that needs more is cut, see there.

    Raises:
        UserError: whatever does not fit together in the recipe; an unknown layout; no usable sample.
    """
    quiet_libraries()
    if not layouts:
        layouts = _USUAL if recipe.parallel == ParallelPlan() else [_OWN_PLAN, *_USUAL]
    parsed = [_parsed(recipe, layout) for layout in layouts]  # a mistake in them comes before the work
    shapes, processor = build_from_recipe(recipe, "meta")
    samples = first_usable(build_dataloader(recipe.data, processor, seed=recipe.train.seed), num_samples)
    memory = available_memory() if memory is None else memory
    factory = _factory(recipe, shapes, nproc, memory)
    return verify_model(factory, samples, parsed, nproc=nproc, pool=pool, memory=memory)


def _parsed(recipe: Recipe, layout: str) -> Layout | ParallelPlan:
    if layout == _OWN_PLAN:
        return _own_plan(recipe)
    try:
        return parse_layout(layout)
    except UserError as error:
        raise UserError(f"{error}\n  or `{_OWN_PLAN}` alone: the recipe's own `parallel`") from None


def _own_plan(recipe: Recipe) -> ParallelPlan:
    """In fp32 and not compiled: roundings of their own would hide what is compared."""

    def exact(plan: ComponentPlan) -> ComponentPlan:
        return plan.model_copy(update={"precision": None, "compile": None})

    own = recipe.parallel
    parts = {name: exact(plan) for name, plan in own.components.items()}
    return own.model_copy(update={"default": exact(own.default), "components": parts})


def model_of(recipe: Recipe, device: str) -> OmniModel:
    """The model of a recipe; the same on every rank, for its weights come from files or from the recipe's seed.

    On the device ``meta`` it has none.
    """
    quiet_libraries()
    return build_from_recipe(recipe, device)[0]


def _factory(recipe: Recipe, shapes: OmniModel, nproc: int, memory: float | None) -> Factory:
    """Makes the recipe's model; on the device ``meta``, as ``shapes`` is, if it is too large for ``nproc`` ranks."""
    return partial(model_of, recipe, "cpu" if fits(shapes, nproc, memory) else "meta")


def first_usable(loader: StepLoader, number: int) -> list[Sample]:
    """The first samples of a run's data order; rows that cannot be used are left out.

    Raises:
        UserError: there are none among ten times as many rows.
    """
    drawn = (loader.rows[draw] for draw in islice(loader.order.draws(0), 10 * number))
    samples = list(islice((sample for sample in drawn if isinstance(sample, Sample)), number))
    if not samples:
        raise UserError(f"none of the first {10 * number} rows can be used")
    return samples
