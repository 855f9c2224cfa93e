"""Encoders that stay in ``main`` have windows that all ranks choose alike, those of sections too."""

from __future__ import annotations

import pytest

import omnitrain as ot
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.state import init_state_of
from omnitrain.parallel.step.plan import topology_of
from omnitrain.parallel.step.windows import bytes_per_feature, window_chooser
from omnitrain.plan.schedule.table import only_passes
from omnitrain.recipe import ComponentPlan, Precision
from tests.parallel.factories import any_to_any
from tests.parallel.laid_out import PLAIN
from tests.tiny import FOUNDATION, tiny_model


def stages_simulated(layout: str) -> tuple[int, ...]:
    """The stages of the pipeline with which this rank compares windows of the audio encoder."""
    audio = ComponentPlan(place="world", encode={"window": "auto"})
    plan = ot.recipe.parse_layout(layout).plan().model_copy(update={"components": {"audio_encoder": audio}})
    state = init_state_of(plan)
    model = ot.build_parallelize_model(any_to_any(), parallel_state=state, parallel_plan=plan, **PLAIN)
    assert window_chooser(model) is not None
    return only_passes(topology_of(model).pipeline, 4).stage_ranks


@pytest.mark.parametrize(
    ("layout", "stages"),
    [("vision1+pp2", (0, 1)), pytest.param("vision1+pp2.gpipe", (0, 1), marks=pytest.mark.slow)],
)
def test_all_ranks_choose_windows_for_the_pipeline_of_main(
    ranks: RankPool, layout: str, stages: tuple[int, ...]
) -> None:
    assert ranks.run(stages_simulated, layout, timeout_s=60, world=3) == [stages] * 3


@pytest.mark.parametrize(
    ("component", "values"),
    [
        ("audio_encoder", FOUNDATION["hidden_size"]),
        ("image_encoder.projector", FOUNDATION["hidden_size"]),
        ("image_encoder.tower", 4 * 16 + 1),  # four patches of 16 values, and the index of the frame
        ("teacher", 48),
    ],
)
def test_features_are_counted_as_wide_as_they_are(component: str, values: int) -> None:
    model = tiny_model(decoders={}, teachers={"teacher": FOUNDATION | {"hidden_size": 48}})
    model.divide(["image_encoder"])
    assert bytes_per_feature(model, component, ComponentPlan(precision=Precision(compute="bfloat16"))) == 2 * values
