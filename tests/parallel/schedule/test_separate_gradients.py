"""Gradients that encoders on all pipeline ranks can lose or count twice, each by name, as large as on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from omnitrain.optim.build import build_optimizer
from omnitrain.parallel.parallelize import build_parallelize_model
from omnitrain.parallel.schedule.accumulate import accumulate_gradients
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.step.plan import step_planner
from omnitrain.recipe import Optimizer
from omnitrain.recipe.layout import parse_layout
from tests.parallel.laid_out import PLAIN, full, pack
from tests.parallel.schedule.test_layouts import samples_of
from tests.parallel.schedule.test_random_items import Drawn, omni, run
from tests.parallel.step.random_tables import step_batch
from tests.tiny import MODEL, SIGLIP, tiny_model

Gradients = dict[str, torch.Tensor]
Compared = Callable[[str], tuple[Gradients, Gradients]]
LAYOUTS = {"internvl": "pp2.tp2.window2.world", "qwen3_vl_moe": "pp2.dp2.ep2.window2.world"}


def one_step(name: str) -> Drawn:
    """Three micro-batches of two ranks: images on one rank alone, then no images at all, then images of the others."""
    every = samples_of(name)
    text, media = ([sample for sample in every if bool(sample.spans) == has] for has in (False, True))
    others = [[text[0]], [text[1]], [text[0], *media]]
    return [[[media[:1], text[:1], text[1:2]], others]]


@pytest.fixture(scope="module")
def gradients_of(ranks: RankPool) -> Compared:
    @cache
    def found(name: str) -> tuple[Gradients, Gradients]:
        """Of four ranks, and of one process."""
        is_alone = name == "internvl"  # tensor parallel ranks have the same samples
        steps = [step[1:] if is_alone else step for step in one_step(name)]
        (of_ranks, *_) = ranks.run(run, name, LAYOUTS[name], steps, timeout_s=60, world=4)
        model = omni(name)
        together = [sample for rank in steps[0] for drawn in rank for sample in drawn]
        accumulate_gradients(model, step_batch(model, step_planner(model), [together]))
        return of_ranks[0].gradients, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    return found


@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param("internvl", "embed_tokens", marks=pytest.mark.second),
        pytest.param("internvl", "vision_tower", marks=pytest.mark.second),
        pytest.param("internvl", "multi_modal_projector", marks=pytest.mark.second),
        ("qwen3_vl_moe", "embed_tokens"),
        ("qwen3_vl_moe", "deepstack_merger_list"),
        ("qwen3_vl_moe", "visual.blocks"),
    ],
    ids=[
        "text embeddings with tp",
        "no factor of tp in the tower",
        "no factor of tp in the projector",
        "text embeddings of samples without images",
        "deepstack",
        "a tower whose gradients are complete only after the last window",
    ],
)
def test_each_gradient_is_that_of_one_process(gradients_of: Compared, name: str, part: str) -> None:
    found, expected = gradients_of(name)
    names = [parameter for parameter in expected if part in parameter]
    sizes = {parameter: float(expected[parameter].norm()) for parameter in names}
    assert names and max(sizes.values()) > 0.001
    largest = max(sizes.values())
    for parameter in names:
        assert float((found[parameter] - expected[parameter]).norm()) <= 1e-5 * max(sizes[parameter], 0.01 * largest)


POOLER = "image_encoder.tower.head."  # the projector reads the patches
TOWER = MODEL["encoders"]["image_encoder"] | {"tower": {"config": SIGLIP | {"vision_use_head": True}}}


def moved_by_adamw(task: str | None) -> dict[str, float]:
    """How far a step moves each of this rank's matrices of the image encoder, relative to its largest value."""
    plan = parse_layout("pp2.world").plan()
    init_state_of(plan)
    given = tiny_model(encoders={"image_encoder": TOWER}, decoders={}).train()
    model = build_parallelize_model(given, parallel_plan=plan, **PLAIN)
    weights = {n: p for n, p in model.named_parameters() if n.startswith("image_encoder") and p.ndim == 2}
    before = {name: full(weight.detach()).clone() for name, weight in weights.items()}
    accumulate_gradients(model, step_planner(model)([pack(task)]))
    build_optimizer(model, Optimizer(learning_rate=0.01, weight_decay=0.1)).step()
    return {n: float((full(w.detach()) - before[n]).abs().max() / before[n].abs().max()) for n, w in weights.items()}


@pytest.mark.parametrize(("task", "trained"), [("images_to_text", True), ("text", False)])
def test_weights_that_nothing_reads_have_no_gradient_and_no_decay(ranks: RankPool, task: str, trained: bool) -> None:
    """Zeros in place of no gradient let AdamW decay them by 0.01 * 0.1."""
    for moved in ranks.run(moved_by_adamw, task, timeout_s=60, world=2):
        unread = {name for name in moved if name.startswith(POOLER)}
        assert len(unread) >= 3 and {moved[name] for name in unread} == {0.0}
        assert all((moved[name] > 0) is trained for name in moved.keys() - unread)
