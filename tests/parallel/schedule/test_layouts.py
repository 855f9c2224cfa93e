"""Pipelines of all families, under every other parallelism, have the losses, gradients and weights of one process."""

from __future__ import annotations

from functools import cache

import pytest

from omnitrain.data.packing.sample import Sample
from omnitrain.models.contract.samples import probe_samples
from omnitrain.models.omni.build import build_omni_model
from omnitrain.models.omni.model import OmniModel
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.verify import verify
from omnitrain.recipe.layout import parse_layout
from omnitrain.recipe.parallel import ParallelPlan
from tests.covering import pairs_in_fp32
from tests.parallel.laid_out import samples
from tests.parallel.schedule.pipelines import build, factory, possible, table

# By default two schedules of a model or two; each runs with every other word of the table at least once.
DEFAULT = {
    "qwen3": ("pp2.v2.sp2", "pp2.tp2.zbv"),
    "qwen3_vl_moe": ("pp2.v2.dp2.ep2.recompute", "pp4.world"),
    "frozen qwen3_vl": ("pp2.v2",),
    "any_to_any": ("pp2.dp2.accum2",),
}
MORE = {
    "qwen3_vl_moe": ("pp2.dp2.ep2.recompute", "pp4", "pp2.zbv.sp2.ep2"),
    "qwen3_vl with LoRA": ("pp2.dp2",),  # adapters on stages by default: test_separate.py
    "qwen3": ("pp2.cp2.accum2.gpipe",),
    "any_to_any": ("pp2.tp2", "pp2.sp2"),
}
# Three axes at once, and copies of the parameters.
EIGHT_RANKS = {
    "qwen3_vl_moe": ("pp2.dp2.sp2.ep2", "pp2.v2.dp2.sp2.ep2.recompute"),
    "qwen3": ("pp2.hsdp2x2", "pp2.tp2.dp2.zbv"),
}


@cache
def samples_of(model: str) -> list[Sample]:
    if model == "any_to_any":
        return samples()
    built = build(model)
    omni = built if isinstance(built, OmniModel) else build_omni_model(foundation=built)
    return [probe.sample for probe in probe_samples(omni.foundation, omni.runner.native)]


def require_equal(ranks: RankPool, model: str, layouts: list[str]) -> None:
    most = max(parse_layout(layout).num_ranks for layout in layouts)
    report = verify(factory(model), samples_of(model), layouts, nproc=most, timeout_s=120, pool=ranks)
    assert {row.layout: row.status for row in report.rows} == dict.fromkeys(
        (str(parse_layout(layout)) for layout in layouts), "equal"
    ), str(report)


def test_the_table_has_every_possible_pair_of_values() -> None:
    cases = table()
    assert len(cases) <= 180
    assert set().union(*map(pairs_in_fp32, cases)) == set().union(*map(pairs_in_fp32, possible()))


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name == "any_to_any" else pytest.mark.second) for name in DEFAULT]
)
def test_a_pipeline_trains_as_one_process(ranks: RankPool, model: str) -> None:
    require_equal(ranks, model, list(DEFAULT[model]))


@pytest.mark.slow
@pytest.mark.parametrize("model", MORE)
def test_another_pipeline_trains_as_one_process(ranks: RankPool, model: str) -> None:
    require_equal(ranks, model, list(MORE[model]))


def divided(layout: str) -> ParallelPlan:
    """A plan whose tensor parallel ranks divide the tokens between blocks."""
    plan = parse_layout(layout).plan()
    foundation = plan.default.model_copy(update={"sequence_parallel": True})
    return plan.model_copy(update={"components": {"foundation": foundation}})


@pytest.mark.second
def test_tensor_parallel_ranks_divide_the_tokens_inside_each_stage(ranks: RankPool) -> None:
    layout = "pp2.v2.tp2.recompute"
    report = verify(factory("qwen3"), samples_of("qwen3"), [layout, divided(layout)], timeout_s=120, pool=ranks)
    whole, slices = report.rows
    assert (whole.status, slices.status) == ("equal", "equal"), str(report)
    assert slices.collectives > whole.collectives


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layouts"),
    [("qwen3", ("pp2.zbv.tp2", "pp2.tp2.gpipe")), ("gemma3", ("pp2.tp2", "pp2.v2.tp2")), ("deepseek_v3", ("pp2.tp2",))],
)
def test_tokens_divided_on_other_schedules_and_models_train_as_one_process(
    ranks: RankPool, model: str, layouts: tuple[str, ...]
) -> None:
    report = verify(factory(model), samples_of(model), list(map(divided, layouts)), timeout_s=300, pool=ranks)
    assert {row.status for row in report.rows} == {"equal"}, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted({case.model for case in table()}))
def test_every_pair_of_the_table_trains_as_one_process(ranks: RankPool, model: str) -> None:
    of_model = [case.layout for case in table() if case.model == model]
    require_equal(ranks, model, [layout for layout in of_model if parse_layout(layout).num_ranks <= 4])


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted({case.model for case in table()} | set(EIGHT_RANKS)))
def test_eight_ranks_train_as_one_process(model: str) -> None:
    layouts = [case.layout for case in table() if case.model == model and parse_layout(case.layout).num_ranks == 8]
    layouts += EIGHT_RANKS.get(model, ())
    if layouts:
        with RankPool(8, preload=("omnitrain.parallel.verify.verify",)) as eight:
            require_equal(eight, model, layouts)
