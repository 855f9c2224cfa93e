"""Ranks that hold a sample divide its items, tensor parallel ranks too: each item is encoded once."""

from __future__ import annotations

import pytest

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.verify.verify import verify
from omnitrain.plan.placement import Place
from omnitrain.recipe.layout import parse_layout
from tests.parallel import factories
from tests.parallel.laid_out import PLAIN
from tests.parallel.sequence.test_sequence import samples_of
from tests.parallel.verify.test_verify import QWEN_GLOBS, hf_samples

FOUNDATION_GLOBS = {glob: style for glob, style in QWEN_GLOBS.items() if "visual" not in glob}


def placed(layout: str, place: Place, tp_plan: dict[str, str] | None = None) -> ot.ParallelPlan:
    """A layout whose image encoder encodes there."""
    encoder = ot.ComponentPlan(place=place)
    return parse_layout(layout).plan().model_copy(update={"tp_plan": tp_plan, "components": {"image_encoder": encoder}})


def require_equal(ranks: RankPool, name: str, plans: list[ot.ParallelPlan]) -> None:
    report = verify(f"tests.parallel.factories:{name}", hf_samples(name), plans, pool=ranks, timeout_s=120)
    assert {row.status for row in report.rows} == {"equal"}, str(report)


@pytest.mark.second
def test_places_over_tensor_parallel_ranks_train_as_one_process(ranks: RankPool) -> None:
    require_equal(ranks, "qwen3_vl", [placed("tp2", "group", FOUNDATION_GLOBS)])  # others: test_separate.py, and slow


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2.dp2", "tp2.sp2", "tp2.cp2", "pp2.tp2"])
@pytest.mark.parametrize("place", ["local", "group", "world"])
def test_every_place_under_every_other_axis_trains_as_one_process(ranks: RankPool, layout: str, place: Place) -> None:
    require_equal(ranks, "qwen3_vl", [placed(layout, place, FOUNDATION_GLOBS)])
    require_equal(ranks, "qwen2_5_omni_thinker", [placed(layout, place)])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["group", "world"])
def test_a_tower_that_is_cut_is_called_by_its_ranks_together(ranks: RankPool, place: Place) -> None:
    require_equal(ranks, "qwen3_vl", [placed(layout, place, QWEN_GLOBS) for layout in ("tp2", "tp2.dp2")])


def encoded_rows(place: Place, tp_plan: dict[str, str], drawn: list[list[Sample]]) -> tuple[int, int, int]:
    """Patches that this rank's tower encoded, those of minimal inputs among them, and those in this rank's samples."""
    state = ot.init_parallel_state(tp_size=2)
    model = ot.build_parallelize_model(
        factories.qwen3_vl().train(), parallel_plan=placed("tp2.dp2", place, tp_plan), **PLAIN
    )
    rows: list[int] = []
    model.foundation.model.visual.blocks[0].register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    samples = drawn[state.dp_rank]
    batch = step_planner(model)([Pack.from_samples(samples)])
    ot.accumulate_gradients(model, batch)
    calls, names = batch.plan.calls_of(state.rank, "image_encoder", 0), batch.plan.topology.media
    idle = [names[call.call_site] for call in calls if not call.items]
    minimal = sum(len(model.minimal_input(name)[0][KEYS[name]]) for name in idle)
    held = sum(len(span.item.features[KEYS[span.component]]) for sample in samples for span in sample.spans)
    return sum(rows), minimal, held


KEYS = {"foundation.image": "pixel_values", "foundation.video": "pixel_values_videos"}


@pytest.mark.parametrize(
    ("place", "times"),
    [
        pytest.param("local", 2, marks=pytest.mark.second),
        pytest.param("group", 1, marks=pytest.mark.slow),
        ("world", 1),
    ],
)
def test_each_item_is_encoded_once_unless_its_ranks_are_local(ranks: RankPool, place: Place, times: int) -> None:
    media = [sample for sample in samples_of("qwen3_vl") if sample.spans]
    found = ranks.run(encoded_rows, place, FOUNDATION_GLOBS, [media, media[:1]], timeout_s=60, world=4)
    encoded, minimal = (sum(rank[column] for rank in found) for column in (0, 1))
    held = sum(rank[2] for rank in found) // 2  # both tensor parallel ranks hold the samples
    assert encoded - minimal == times * held and held > 0
