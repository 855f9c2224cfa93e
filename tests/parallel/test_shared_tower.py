"""Ranks that share a row share each call of a tower, too: losses and gradients are those of one process."""

from __future__ import annotations

import pytest

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.data.packing.sample import Sample
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.verify.verify import verify
from tests.parallel import factories
from tests.parallel.laid_out import laid_out
from tests.parallel.sequence.test_sequence import samples_of
from tests.plan.implied_collectives import has_exchange

TOWERS = {
    "deepstack_of_four_heads": ("image_encoder",),
    "windows_of_four_heads": ("image_encoder",),
    "glm4v": ("image_encoder",),
    "qwen2_5_omni_thinker": ("image_encoder", "audio_encoder"),
    "qwen3_omni_moe_thinker": ("image_encoder", "audio_encoder"),
    "grid_tower": ("image_encoder",),
}
TWO = {"ulysses": 2, "dp_shard": 2, "memory": {"recompute": "full"}}


def shared(name: str, **default: object) -> ot.ParallelPlan:
    """A plan under which the ranks of a row share the towers of a family."""
    plan = ot.ComponentPlan(**default)
    own = ot.ComponentPlan(ulysses=(plan.ulysses or 1) * (plan.cp or 1))
    return ot.ParallelPlan(default=plan, components=dict.fromkeys(TOWERS[name], own))


def statuses(ranks: RankPool, name: str, plans: list[ot.ParallelPlan], samples: list[Sample] | None = None) -> str:
    found = samples if samples is not None else samples_of(name)
    report = verify(f"tests.parallel.factories:{name}", found, plans, pool=ranks, timeout_s=240)
    return " ".join(row.status for row in report.rows) if report.ok else str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOWERS)
def test_every_tower_that_takes_one_row_may_be_shared(ranks: RankPool, name: str) -> None:
    plans = [shared(name, **TWO), shared(name, ulysses=2), shared(name, cp=2, memory={"recompute": "full"})]
    assert statuses(ranks, name, plans) == "equal equal equal"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepstack_of_four_heads", "windows_of_four_heads"])
def test_four_ranks_share_a_tower(ranks: RankPool, name: str) -> None:
    assert statuses(ranks, name, [shared(name, ulysses=4), shared(name, ulysses=2, cp=2)]) == "equal equal"


@pytest.mark.slow
def test_a_tower_is_shared_beside_tensor_parallel_layers(ranks: RankPool) -> None:
    assert statuses(ranks, "qwen2_5_vl", [shared("windows_of_four_heads", ulysses=2, tp=2)]) == "equal"


@pytest.mark.parametrize(
    ("name", "default"),
    [
        pytest.param(
            "deepstack_of_four_heads", TWO, id="deepstack, text on half of the ranks", marks=pytest.mark.second
        ),
        pytest.param("windows_of_four_heads", {"ulysses": 2}, id="windows"),
    ],
)
def test_a_shared_tower_trains_as_in_one_process(ranks: RankPool, name: str, default: dict[str, object]) -> None:
    text, *_, two_images = (sample for sample in samples_of(name) if len(sample.spans) in (0, 2))
    assert statuses(ranks, name, [shared(name, **default)], [text, two_images]) == "equal"


def rows_between_blocks(drawn: list[list[Sample]]) -> tuple[list[int], list[bool], int]:
    """Rows that this rank's second block got, call by call; which calls had no items; whether rows moved."""
    model = laid_out(
        components={"image_encoder": {"ulysses": 2}}, state={"ulysses_size": 2}, model=factories.qwen2_5_vl().train()
    )
    rows: list[int] = []
    block = model.foundation.model.visual.blocks[1]
    block.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    state = ot.get_parallel_state()
    batch = step_planner(model)([Pack.from_samples(drawn[state.dp_rank])])
    ot.accumulate_gradients(model, batch)
    calls = batch.plan.calls_of(state.rank, "image_encoder", 0)
    return rows, [not call.items for call in calls], has_exchange(batch.plan, "image_encoder", 0, state.rank)


@pytest.mark.second
def test_each_rank_runs_the_blocks_over_its_part_of_every_item(ranks: RankPool) -> None:
    (image,) = (sample for sample in samples_of("qwen2_5_vl") if [s.component for s in sample.spans] == IMAGE)
    text = samples_of("qwen2_5_vl")[0]
    patches = len(image.spans[0].item.features["pixel_values"])
    results = ranks.run(rows_between_blocks, [[image], [text]], timeout_s=60)
    assert [rows for rows, _, _ in results[:2]] == [[patches // 2]] * 2
    assert [minimal for _, minimal, _ in results] == [[False], [False], [True], [True]]
    assert not any(exchanges for _, _, exchanges in results)


IMAGE = ["foundation.image"]
