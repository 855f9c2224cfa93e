from __future__ import annotations

import gc

import pytest
import torch

import omnitrain as ot
from omnitrain.models.omni.build import build_omni_model
from omnitrain.parallel.fake_world import fake_world
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.recipe.layout import parse_layout
from tests.parallel import factories
from tests.parallel.expert.test_experts import samples_of
from tests.parallel.laid_out import PLAIN, samples


def left_in_cycles(name: str, layout: str) -> list[str]:
    """Tensors of the second step that only Python's garbage collector, which may come many steps later, would find."""
    plan, built = parse_layout(layout).plan(), getattr(factories, name)()
    init_state_of(plan)
    own = samples() if isinstance(built, ot.OmniModel) else samples_of(built)
    model = built if isinstance(built, ot.OmniModel) else build_omni_model(foundation=built)
    model = ot.build_parallelize_model(model.train(), parallel_plan=plan, **PLAIN)
    planner, packs = ot.step_planner(model), [ot.Pack.from_samples(own), ot.Pack.from_samples(own[::-1])]

    def step() -> None:
        ot.accumulate_gradients(model, planner(packs))
        ot.clip_gradients(model.parameters(), 1.0)
        model.zero_grad(set_to_none=True)

    step()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        step()
        gc.collect()
        return [f"{tuple(thing.shape)}" for thing in gc.garbage if isinstance(thing, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    "name, layout",
    [("any_to_any", "dp2.recompute"), ("any_to_any", "sp2"), ("qwen3_of_four_heads", "tp2"), ("qwen3_moe", "dp2.ep2")],
)
def test_a_step_frees_every_tensor_without_the_garbage_collector(ranks: RankPool, name: str, layout: str) -> None:
    assert ranks.run(left_in_cycles, name, layout, timeout_s=60, world=2) == [[], []]


def test_a_fake_world_leaves_frozen_what_its_process_has_frozen() -> None:
    """The session of tests freezes its imports."""
    frozen = gc.get_freeze_count()
    with fake_world(2):
        assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.01) and frozen > 100_000
    assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.01)
