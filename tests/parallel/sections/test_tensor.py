"""A section shards the matrices of its tower over tensor parallel ranks of its own."""

from __future__ import annotations

import pytest

from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.verify.verify import verify
from omnitrain.recipe import ComponentPlan, ParallelPlan
from omnitrain.recipe.parallel import Section
from tests.parallel.schedule.separate import factory
from tests.parallel.schedule.test_layouts import samples_of

LAYERS = "tower.encoder.layers.*"
GLOBS = {
    **{f"{LAYERS}.self_attn.{name}_proj": "colwise" for name in "qkv"},
    f"{LAYERS}.self_attn.out_proj": "rowwise",
    f"{LAYERS}.mlp.fc1": "colwise",
    f"{LAYERS}.mlp.fc2": "rowwise",
}


@pytest.mark.slow
@pytest.mark.parametrize(("main", "twice"), [(2, False), (1, True)])
def test_a_tower_with_tp2_in_a_section_trains_as_one_process(ranks: RankPool, main: int, twice: bool) -> None:
    plan = ParallelPlan(
        default=ComponentPlan(dp_shard=main),
        components={"image_encoder": ComponentPlan(tp=2)},
        sections={"vision": Section(components=["image_encoder"], ranks=2, encode_twice=twice)},
        tp_plan=GLOBS,
    )
    report = verify(factory("any_to_any", "all"), samples_of("any_to_any"), [plan], timeout_s=60, pool=ranks)
    assert [row.status for row in report.rows] == ["equal"], str(report)
    assert report.rows[0].grad_error < 1e-5
