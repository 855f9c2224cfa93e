import sys
from collections import Counter
from typing import Any

import pytest

from omnitrain.ops.rank_meter import Collective, Op
from omnitrain.parallel.fake_world import fake_world
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.recipe import parse_layout
from omnitrain.train.planning.rank_run import ActionRun, predict_rank
from tests.train.planning import planned
from tests.train.planning.planned import EXPERTS, FOUNDATION, IMAGES


def test_a_fake_world_leaves_the_words_of_errors_as_they_are() -> None:
    before = sys.excepthook
    with fake_world(2):
        assert sys.excepthook is before
    assert sys.excepthook is before


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (FOUNDATION | {"num_hidden_layers": 1}, "dp2"),
        pytest.param(FOUNDATION | EXPERTS, "dp2.ep2.recompute", marks=pytest.mark.slow),
        pytest.param(IMAGES, "tp2", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_micro_batch_that_adds_to_gradients_stands_for_all(config: dict[str, Any], layout: str) -> None:
    trained, plan = planned.training(config), parse_layout(layout).plan()
    several, one = predict_rank(trained, plan, 2, 2), predict_rank(trained, plan, 2, 1, adds=True)
    assert one.peak == several.peak
    assert [run.end.peak for run in one.actions] == [run.end.peak for run in several.actions[-2:]]


def sent_and_multiplied(run: ActionRun) -> tuple[Counter[Collective], int]:
    """Collectives of an action, and the FLOPs of its products."""
    work = run.end.work
    sent = Counter({one: times for one, times in work.items() if isinstance(one, Collective)})
    return sent, sum(one.flops * times for one, times in work.items() if isinstance(one, Op))


@pytest.mark.parametrize(
    ("config", "layout", "num_packs"),
    [
        (FOUNDATION, "dp2", 1),
        pytest.param(FOUNDATION, "pp2.recompute", 3, marks=pytest.mark.slow),
        pytest.param(FOUNDATION | EXPERTS, "sp2.ep2", 2, marks=pytest.mark.slow),
        pytest.param(IMAGES, "tp2", 2, marks=pytest.mark.slow),
        pytest.param(FOUNDATION, "tp2.recompute", 2, marks=pytest.mark.slow),
        pytest.param(FOUNDATION, "cp2", 1, marks=pytest.mark.slow),
        pytest.param(FOUNDATION | EXPERTS, "dp2.ep2", 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rank_of_a_fake_world_holds_what_a_real_one_holds_to_the_byte(
    ranks: RankPool, config: dict[str, Any], layout: str, num_packs: int
) -> None:
    real = ranks.run(planned.measured, config, layout, num_packs, world=2, timeout_s=120)
    plan = parse_layout(layout).plan()
    for rank in range(2):
        found, expected = predict_rank(planned.training(config), plan, 2, num_packs, rank), real[rank]
        sizes = ("weights", "gradients", "optimizer")
        assert [getattr(found, size) for size in sizes] == [getattr(expected, size) for size in sizes]
        assert found.peak - expected.peak in (0, -192, 192)  # 192: a table that a process keeps after its first experts
        assert found.optimizer == pytest.approx(2 * found.weights, rel=0.01)  # two moments of AdamW, sharded alike
        assert [run.action for run in found.actions] == [run.action for run in expected.actions]
        assert [sent_and_multiplied(run) for run in found.actions] == [
            sent_and_multiplied(run) for run in expected.actions
        ]
