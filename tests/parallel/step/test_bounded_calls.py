"""`encode.call_elements`: an encoder makes several calls of bounded size, and the step stays the same."""

from __future__ import annotations

from typing import Any

import pytest

import omnitrain as ot
from omnitrain.data.packing.pack import Pack
from omnitrain.models.components.outputs import media_calls
from omnitrain.parallel.spawn.pool import RankPool
from omnitrain.parallel.step.plan import step_planner
from omnitrain.parallel.verify.verify import verify
from omnitrain.recipe.layout import parse_layout
from tests.parallel.laid_out import laid_out, samples
from tests.parallel.verify.test_verify import hf_samples
from tests.tiny import tiny_model, tiny_processor, tiny_samples


def bounded(layout: str, elements: int, **fields: Any) -> ot.ParallelPlan:
    plan = parse_layout(layout).plan()
    encoder = ot.ComponentPlan(**fields).changed({"encode.call_elements": elements})
    return plan.model_copy(update={"components": {**plan.components, "image_encoder": encoder}})


def elements_of(task: str) -> list[int]:
    return [span.item.num_elements for sample in samples(task) for span in sample.spans]


def calls_of(plan: dict[str, object], packs: int) -> list[int]:
    """Pixels of each call of this rank's image encoder in a step."""
    model = laid_out(components={"image_encoder": plan})
    found: list[int] = []
    encoder = model.get_submodule("image_encoder")
    inner = encoder.lm_encode

    def lm_encode(features: dict, num_tokens: tuple[int, ...]) -> object:
        found.append(features["pixel_values"].numel())
        return inner(features, num_tokens)

    encoder.lm_encode = lm_encode
    made = tiny_samples(tiny_processor(tiny_model()), 4, ["images_to_text", "video_to_text"])
    ot.accumulate_gradients(model, step_planner(model)([Pack.from_samples(made)] * packs))
    return found


def test_calls_have_the_items_in_order_and_a_larger_item_is_alone() -> None:
    made = tiny_samples(tiny_processor(tiny_model()), 4, ["images_to_text", "video_to_text"])
    batch = Pack.from_samples(made).inputs["image_encoder"]
    (whole,) = media_calls(batch)
    of_image = min(whole.num_elements)
    calls = list(media_calls(batch, most_elements=2 * of_image))
    assert len(calls) > 2 and sum((call.num_tokens for call in calls), ()) == whole.num_tokens
    assert all(len(call.num_tokens) == 1 or sum(call.num_elements) <= 2 * of_image for call in calls)


@pytest.mark.parametrize("place", ["world", pytest.param("local", marks=pytest.mark.slow)])
def test_no_call_is_larger_than_its_limit(ranks: RankPool, place: str) -> None:
    (of_image,) = set(elements_of("images_to_text"))
    free, cut = (
        ranks.run(calls_of, {"place": place, **limit}, 2, timeout_s=60, world=2)
        for limit in ({}, {"encode": {"call_elements": 2 * of_image}})
    )
    assert [sum(calls) for calls in cut] == [sum(calls) for calls in free]
    free_longest, longest = (max(max(calls) for calls in of_ranks) for of_ranks in (free, cut))
    assert {len(calls) for calls in free} == {2}
    assert longest <= max(2 * of_image, *elements_of("video_to_text")) < free_longest
    assert len({len(calls) for calls in cut}) == 1 and len(cut[0]) > 4


LAYOUTS = [("dp1", {}), ("dp2", {}), ("dp2", {"place": "world"})]
APART = ("vision1+dp2.accum2", {})
MORE = [("dp2.accum2", {"place": "world", "encode": {"window": "step"}}), ("pp2.accum2", {"place": "world"})]


@pytest.mark.parametrize(
    ("layout", "fields"),
    [LAYOUTS[2], *(pytest.param(*one, marks=pytest.mark.slow) for one in (*LAYOUTS[:2], APART))],
)
def test_bounded_calls_train_as_one_call(ranks: RankPool, layout: str, fields: dict[str, object]) -> None:
    plan = bounded(layout, 400, **fields)
    report = verify("tests.parallel.factories:any_to_any", samples(), [plan], pool=ranks, timeout_s=120)
    assert {row.status for row in report.rows} == {"equal"}, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "fields"), [*LAYOUTS, *MORE])
def test_bounded_calls_of_a_native_tower_train_as_one_call(
    ranks: RankPool, layout: str, fields: dict[str, object]
) -> None:
    plan = bounded(layout, 2000, **fields)
    report = verify("tests.parallel.factories:qwen3_vl", hf_samples("qwen3_vl"), [plan], pool=ranks, timeout_s=120)
    assert {row.status for row in report.rows} == {"equal"}, str(report)
